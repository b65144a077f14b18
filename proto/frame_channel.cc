// Blocking send and receive of frames with deadlines.
#include "proto/frame_channel.h"

#include <array>
#include <utility>
#include <vector>

#include "common/socket.h"

namespace modelcache {

Result<void> FrameChannel::Send(FrameHeader header, std::string_view body,
                                std::span<const int> descriptors, TimePoint deadline) {
  if (body.size() > kMaxBodyBytes || descriptors.size() > kMaxDescriptors) {
    return Error{ErrorCode::kLimit,
                 "message of " + std::to_string(body.size()) + " bytes and " +
                     std::to_string(descriptors.size()) + " descriptors, limits " +
                     std::to_string(kMaxBodyBytes) + " and " + std::to_string(kMaxDescriptors),
                 0};
  }
  header.descriptor_count = static_cast<std::uint8_t>(descriptors.size());
  const std::string bytes = EncodeFrame(header, body);
  return SendAll(socket_.get(), std::as_bytes(std::span(bytes)), descriptors, deadline);
}

Result<Frame> FrameChannel::Receive(TimePoint deadline) {
  std::array<std::byte, 16384> buffer;
  while (true) {
    Result<std::optional<Frame>> next = reader_.Next();
    if (!next.ok()) {
      return std::move(next).error();
    }
    if (next->has_value()) {
      return std::move(**next);
    }
    std::vector<UniqueFd> descriptors;
    Result<Received> received = ReceiveSome(socket_.get(), buffer, descriptors);
    if (!received.ok()) {
      return std::move(received).error();
    }
    if (received->would_block) {
      if (auto ready = WaitReadable(socket_.get(), deadline); !ready.ok()) {
        return std::move(ready).error();
      }
      continue;
    }
    if (received->closed) {
      return Error{ErrorCode::kUnavailable, "the peer closed the connection", 0};
    }
    auto fed = reader_.Feed(std::span(buffer).first(received->size_bytes), std::move(descriptors));
    if (!fed.ok()) {
      return std::move(fed).error();
    }
  }
}

}  // namespace modelcache
