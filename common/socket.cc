// sendmsg and recvmsg with SCM_RIGHTS, deadlines by poll.
#include "common/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/socket_folder.h"

namespace modelcache {
namespace {

// Room for the control message that carries kMaxDescriptors descriptors.
struct alignas(cmsghdr) ControlBuffer {
  std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> bytes;
};

void AttachDescriptors(msghdr& message, ControlBuffer& control, std::span<const int> descriptors) {
  message.msg_control = control.bytes.data();
  message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
}

void TakeDescriptors(msghdr& message, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
}

Result<void> WaitFor(int socket, short events, TimePoint deadline) {
  while (true) {
    int timeout_ms = -1;
    if (deadline != kNoDeadline) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
    }
    pollfd entry{socket, events, 0};
    const int ready = ::poll(&entry, 1, timeout_ms);
    if (ready > 0) {
      return {};
    }
    if (ready < 0 && errno != EINTR) {
      return SystemError("poll", errno);
    }
    if (ready == 0 && std::chrono::steady_clock::now() >= deadline) {
      return Error{ErrorCode::kTimeout, "the deadline passed while waiting for the peer", 0};
    }
  }
}

// A connect() to a Unix socket waits for a full queue as long as SO_SNDTIMEO says.
Result<void> LimitBlocking(int socket, TimePoint deadline) {
  if (deadline == kNoDeadline) {
    return {};
  }
  const auto left =
      std::chrono::ceil<std::chrono::microseconds>(deadline - std::chrono::steady_clock::now());
  const std::int64_t micros = std::max<std::int64_t>(left.count(), 1);  // 0 would mean for ever
  const timeval limit{micros / 1'000'000, micros % 1'000'000};
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    return SystemError("setsockopt(SO_SNDTIMEO)", errno);
  }
  return {};
}

}  // namespace

Result<std::size_t> SendSome(int socket, std::span<const std::byte> bytes,
                             std::span<const int> descriptors) {
  if (descriptors.size() > kMaxDescriptors) {
    return Error{ErrorCode::kLimit,
                 std::to_string(descriptors.size()) + " descriptors in one message, limit " +
                     std::to_string(kMaxDescriptors),
                 0};
  }
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};  // sendmsg does not write it
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  ControlBuffer control;
  if (!descriptors.empty()) {
    AttachDescriptors(message, control, descriptors);
  }
  ssize_t sent = -1;
  do {
    sent = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) {
    return static_cast<std::size_t>(sent);
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK) {
    return std::size_t{0};
  }
  const int saved = errno;
  Error error = SystemError("sendmsg", saved);
  if (saved == EPIPE || saved == ECONNRESET || saved == ENOTCONN) {
    error.code = ErrorCode::kUnavailable;
  }
  return error;
}

Result<Received> ReceiveSome(int socket, std::span<std::byte> buffer,
                             std::vector<UniqueFd>& descriptors) {
  iovec vector{buffer.data(), buffer.size()};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  ssize_t got = -1;
  do {
    got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  Received received;
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      received.would_block = true;
      return received;
    }
    if (errno == ECONNRESET) {
      received.closed = true;
      return received;
    }
    return SystemError("recvmsg", errno);
  }
  TakeDescriptors(message, descriptors);
  received.size_bytes = static_cast<std::size_t>(got);
  received.closed = got == 0;
  received.truncated = (message.msg_flags & MSG_CTRUNC) != 0;
  return received;
}

Result<void> SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                     TimePoint deadline) {
  while (!bytes.empty()) {
    Result<std::size_t> sent = SendSome(socket, bytes, descriptors);
    if (!sent.ok()) {
      return std::move(sent).error();
    }
    if (*sent == 0) {
      if (auto ready = WaitFor(socket, POLLOUT, deadline); !ready.ok()) {
        return ready;
      }
      continue;
    }
    bytes = bytes.subspan(*sent);
    descriptors = {};
  }
  return {};
}

Result<void> WaitReadable(int socket, TimePoint deadline) {
  return WaitFor(socket, POLLIN, deadline);
}

Result<std::pair<UniqueFd, UniqueFd>> MakeSocketPair() {
  std::array<int, 2> ends{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return SystemError("socketpair", errno);
  }
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

Result<UniqueFd> ConnectUnix(const std::string& path, TimePoint deadline) {
  if (auto checked = CheckSocketPath(path); !checked.ok()) {
    return std::move(checked).error();
  }
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) {
    return SystemError("socket", errno);
  }
  if (auto limited = LimitBlocking(socket.get(), deadline); !limited.ok()) {
    return std::move(limited).error();
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  int failed = 0;
  do {
    failed = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (failed != 0 && errno == EINTR);
  if (failed == 0) {
    return socket;
  }
  const int saved = errno;
  Error error = SystemError("connect to " + path, saved);
  if (saved == ENOENT || saved == ECONNREFUSED || saved == ENOTDIR) {
    error.code = ErrorCode::kUnavailable;
  } else if (saved == EAGAIN) {
    error.code = ErrorCode::kTimeout;
  }
  return error;
}

Result<PeerCredentials> GetPeerCredentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return SystemError("getsockopt(SO_PEERCRED)", errno);
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

std::uint64_t PidNamespace() {
  struct stat status = {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace modelcache
