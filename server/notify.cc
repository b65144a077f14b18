// One datagram per state.
#include "server/notify.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "common/unique_fd.h"

namespace modelcache {

Notifier Notifier::FromEnvironment() {
  const char* address = std::getenv("NOTIFY_SOCKET");
  Notifier notifier(address == nullptr ? "" : address);
  (void)::unsetenv("NOTIFY_SOCKET");
  return notifier;
}

Result<void> Notifier::Send(std::string_view state) const {
  if (address_.empty()) {
    return {};
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const bool usable = address_.size() > 1 && address_.size() < sizeof address.sun_path &&
                      (address_[0] == '/' || address_[0] == '@');
  if (!usable) {
    return Error{ErrorCode::kInvalidArgument, "NOTIFY_SOCKET is no usable address: " + address_, 0};
  }
  std::memcpy(address.sun_path, address_.data(), address_.size());
  if (address_[0] == '@') {
    address.sun_path[0] = '\0';
  }
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) {
    return SystemError("socket", errno);
  }
  // An abstract name is exactly as long as told; a trailing zero byte would be part of it.
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  if (::sendto(socket.get(), state.data(), state.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&address), length) < 0) {
    return SystemError("sendto the service manager", errno);
  }
  return {};
}

}  // namespace modelcache
