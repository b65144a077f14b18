// FrameChannel: whole frames over a blocking Unix stream socket, for clients and loaders.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/frame.h"

namespace modelcache {

// Owns the socket. Not synchronised. After any error but kTimeout of Receive the channel is dead.
class FrameChannel {
 public:
  explicit FrameChannel(UniqueFd socket) : socket_(std::move(socket)) {}

  // Errors: kTimeout, kUnavailable (the peer is gone), kLimit, kSystem.
  Result<void> Send(FrameHeader header, std::string_view body, std::span<const int> descriptors,
                    TimePoint deadline);

  // The next frame. Errors: kTimeout (nothing is lost; call again), kUnavailable (the peer closed),
  // kProtocol, kLimit (descriptors were dropped), kSystem.
  Result<Frame> Receive(TimePoint deadline);

  [[nodiscard]] int fd() const { return socket_.get(); }

 private:
  UniqueFd socket_;
  FrameReader reader_;
};

}  // namespace modelcache
