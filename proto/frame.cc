// Frame encoding and the incremental reader.
#include "proto/frame.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/socket.h"
#include "proto/version.h"

namespace modelcache {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

constexpr std::array<char, 4> kMagic = {'M', 'D', 'L', 'C'};

Error ProtocolError(std::string message) {
  return Error{ErrorCode::kProtocol, std::move(message), 0};
}

}  // namespace

Error Frame::MissingDescriptorsError() const {
  return Error{ErrorCode::kLimit,
               std::to_string(header.descriptor_count) + " descriptors were sent, " +
                   std::to_string(descriptors.size()) +
                   " arrived (limit on open descriptors of this process, RLIMIT_NOFILE)",
               0};
}

std::string EncodeFrame(FrameHeader header, std::string_view body) {
  std::string bytes(kFrameHeaderBytes, '\0');
  const auto length = static_cast<std::uint32_t>(body.size());
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  bytes[4] = static_cast<char>(kProtocolVersion);
  bytes[5] = static_cast<char>(header.type);
  bytes[6] = static_cast<char>(header.flags);
  bytes[7] = static_cast<char>(header.descriptor_count);
  std::memcpy(&bytes[8], &header.request_id, sizeof header.request_id);
  std::memcpy(&bytes[12], &length, sizeof length);
  bytes += body;
  return bytes;
}

Result<FrameHeader> DecodeFrameHeader(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return ProtocolError("the peer does not speak this protocol: a frame starts without 'MDLC'");
  }
  FrameHeader header;
  header.version = static_cast<std::uint8_t>(bytes[4]);
  header.type = static_cast<MessageType>(bytes[5]);
  header.flags = static_cast<std::uint8_t>(bytes[6]);
  header.descriptor_count = static_cast<std::uint8_t>(bytes[7]);
  std::memcpy(&header.request_id, &bytes[8], sizeof header.request_id);
  std::memcpy(&header.body_bytes, &bytes[12], sizeof header.body_bytes);
  // Hello frames of every version must be readable, so that the refusal can be too.
  if (header.version < kOldestProtocolVersion && header.type != MessageType::kHello) {
    return ProtocolError("frame of protocol version " + std::to_string(header.version) +
                         ", oldest accepted " + std::to_string(kOldestProtocolVersion));
  }
  return header;
}

Result<void> FrameReader::Feed(std::span<const std::byte> bytes,
                               std::vector<UniqueFd> descriptors) {
  if (consumed_ > 0) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::move(descriptors.begin(), descriptors.end(), std::back_inserter(descriptors_));
  // One read may end a frame and begin the next, each with its own.
  return CheckPending(2 * kMaxDescriptors);
}

Result<void> FrameReader::CheckPending(std::size_t most) const {
  if (descriptors_.size() <= most) {
    return {};
  }
  return ProtocolError(std::to_string(descriptors_.size()) +
                       " descriptors arrived that no frame announces, limit " +
                       std::to_string(most));
}

Result<std::optional<Frame>> FrameReader::Nothing() const {
  if (auto pending = CheckPending(kMaxDescriptors); !pending.ok()) {
    return std::move(pending).error();
  }
  return std::optional<Frame>();
}

Result<std::optional<Frame>> FrameReader::Next() {
  const std::string_view rest = std::string_view(buffer_).substr(consumed_);
  if (rest.size() < kFrameHeaderBytes) {
    return Nothing();
  }
  auto header = DecodeFrameHeader(std::span<const std::byte, kFrameHeaderBytes>(
      reinterpret_cast<const std::byte*>(rest.data()), kFrameHeaderBytes));
  if (!header.ok()) {
    return std::move(header).error();
  }
  if (header->body_bytes > max_body_bytes_) {
    return ProtocolError("frame body of " + std::to_string(header->body_bytes) + " bytes, limit " +
                         std::to_string(max_body_bytes_));
  }
  if (rest.size() - kFrameHeaderBytes < header->body_bytes) {
    return Nothing();
  }
  Frame frame;
  frame.header = *header;
  frame.body = rest.substr(kFrameHeaderBytes, header->body_bytes);
  const auto present = std::min<std::size_t>(descriptors_.size(), header->descriptor_count);
  const auto last = std::next(descriptors_.begin(), static_cast<std::ptrdiff_t>(present));
  std::move(descriptors_.begin(), last, std::back_inserter(frame.descriptors));
  descriptors_.erase(descriptors_.begin(), last);
  consumed_ += kFrameHeaderBytes + header->body_bytes;
  return std::optional<Frame>(std::move(frame));
}

}  // namespace modelcache
