// Bytes and descriptors across a Unix stream socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"

namespace modelcache {

// The kernel passes at most this many descriptors with one message (SCM_MAX_FD).
inline constexpr std::size_t kMaxDescriptors = 253;

// Sends a prefix of `bytes` without blocking and returns its length; 0 when the socket is full.
// `descriptors` travel with the first byte and only when at least one byte was sent.
// Errors: kUnavailable when the peer is gone, kSystem.
Result<std::size_t> SendSome(int socket, std::span<const std::byte> bytes,
                             std::span<const int> descriptors);

struct Received {
  std::size_t size_bytes = 0;
  bool would_block = false;  // nothing there now; size_bytes is 0
  bool closed = false;       // the peer closed its end; size_bytes is 0
  bool truncated = false;    // the kernel dropped descriptors (MSG_CTRUNC: our limit was met)
};

// Receives what is there without blocking; descriptors are close-on-exec and appended.
// Errors: kSystem.
Result<Received> ReceiveSome(int socket, std::span<std::byte> buffer,
                             std::vector<UniqueFd>& descriptors);

// As SendSome until all is sent or `deadline` passes. Errors: also kTimeout.
Result<void> SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                     TimePoint deadline);

// Waits until the socket is readable (or closed) or `deadline` passes. Errors: kTimeout, kSystem.
Result<void> WaitReadable(int socket, TimePoint deadline);

// A connected, close-on-exec pair of stream sockets. Errors: kLimit, kSystem.
Result<std::pair<UniqueFd, UniqueFd>> MakeSocketPair();

// Connects to the socket file at `path`, close-on-exec; waits until `deadline` for a listener whose
// queue is full. Errors: kTimeout, those of CheckSocketPath, kUnavailable when nobody listens
// there, kPermission, kLimit, kSystem.
Result<UniqueFd> ConnectUnix(const std::string& path, TimePoint deadline = kNoDeadline);

// Who is at the other end when it connected (SO_PEERCRED). pid is 0 when it lives in a PID
// namespace this process cannot see: treat it as unknown.
struct PeerCredentials {
  std::int64_t pid = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
};
Result<PeerCredentials> GetPeerCredentials(int socket);

// Inode number of this process's PID namespace; 0 when procfs does not tell.
std::uint64_t PidNamespace();

}  // namespace modelcache
