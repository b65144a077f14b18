// Frames: a 16-byte header and a body of JSON. Bytes to frames and back; never touches a socket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"
#include "common/unique_fd.h"

namespace modelcache {

// docs/protocol.md describes each. The numbers are part of the protocol.
enum class MessageType : std::uint8_t {
  kHello = 1,
  // client -> daemon
  kOpen = 2,
  kRelease = 3,
  kArenaDescriptors = 4,
  kProgress = 5,  // daemon -> client, an event
  kList = 6,
  kStatus = 7,
  kWhy = 8,
  kEvict = 9,
  kPin = 10,
  kVerify = 11,
  kMetrics = 12,
  kShutdown = 13,
  kCancel = 14,  // an event
  // loader channel
  kJob = 32,             // daemon -> loader
  kCandidates = 33,      // loader -> daemon
  kReserve = 34,         // loader -> daemon
  kCommit = 35,          // loader -> daemon
  kLoaderProgress = 36,  // loader -> daemon, an event
  kJobFailed = 37,       // loader -> daemon, an event
  kVerified = 38,        // loader -> daemon, an event
};

// Flag bits of a header.
inline constexpr std::uint8_t kFlagReply = 1;  // answers the request with the same id
inline constexpr std::uint8_t kFlagError = 2;  // with kFlagReply: the body is an ErrorReply
inline constexpr std::uint8_t kFlagEvent = 4;  // expects no reply

inline constexpr std::size_t kFrameHeaderBytes = 16;
inline constexpr std::size_t kMaxBodyBytes = 16U << 20U;
inline constexpr std::size_t kMaxRequestBytes = 1U << 20U;  // what the daemon takes from a client

// Little-endian on the wire:
//   0 magic "MDLC"   4 version   5 type   6 flags   7 descriptor count   8 request id   12 length
struct FrameHeader {
  std::uint8_t version = 0;
  MessageType type = MessageType::kHello;
  std::uint8_t flags = 0;
  std::uint8_t descriptor_count = 0;  // travel by SCM_RIGHTS with the first byte of the frame
  std::uint32_t request_id = 0;       // chosen by the requester, repeated by replies and events
  std::uint32_t body_bytes = 0;

  [[nodiscard]] bool IsReply() const { return (flags & kFlagReply) != 0; }
  [[nodiscard]] bool IsError() const { return (flags & kFlagError) != 0; }
  [[nodiscard]] bool IsEvent() const { return (flags & kFlagEvent) != 0; }
};

// A whole frame as received.
struct Frame {
  FrameHeader header;
  std::string body;
  std::vector<UniqueFd> descriptors;

  // The kernel dropped some on the way in: this process met its limit on open descriptors. The
  // connection stays usable.
  [[nodiscard]] bool DescriptorsMissing() const {
    return descriptors.size() < header.descriptor_count;
  }
  // The kLimit error that says so, with both numbers.
  [[nodiscard]] Error MissingDescriptorsError() const;
};

// The bytes of one frame. `header.body_bytes` and version are set from the arguments and the build.
// REQUIRES body.size() <= kMaxBodyBytes.
std::string EncodeFrame(FrameHeader header, std::string_view body);

// Reads one header. Errors: kProtocol (wrong magic, version, or a length above kMaxBodyBytes; the
// message has the found and the expected value).
Result<FrameHeader> DecodeFrameHeader(std::span<const std::byte, kFrameHeaderBytes> bytes);

// Takes bytes in pieces of any size and gives whole frames in order. Not synchronised.
class FrameReader {
 public:
  // Frames with a longer body are refused before any of it is buffered.
  explicit FrameReader(std::size_t max_body_bytes = kMaxBodyBytes)
      : max_body_bytes_(max_body_bytes) {}

  // Errors: kProtocol; the connection cannot be used afterwards.
  Result<void> Feed(std::span<const std::byte> bytes, std::vector<UniqueFd> descriptors);

  // The next whole frame, or nothing yet. Errors: kProtocol. REQUIRES that it is called until it
  // gives nothing after each Feed, so that descriptors stay with their frame.
  Result<std::optional<Frame>> Next();

 private:
  [[nodiscard]] Result<void> CheckPending(std::size_t most) const;
  [[nodiscard]] Result<std::optional<Frame>> Nothing() const;

  std::size_t max_body_bytes_;
  std::string buffer_;
  std::size_t consumed_ = 0;
  std::deque<UniqueFd> descriptors_;
};

}  // namespace modelcache
