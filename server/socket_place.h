// SocketPlace: the daemon's listening socket, passed by a service manager or bound to a path.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/result.h"
#include "common/unique_fd.h"

namespace modelcache {

// A listening socket. When it was bound here, the destructor removes its file (unless another one
// lies there by now) and then gives up the lock; a passed socket's file belongs to whoever bound
// it.
class SocketPlace {
 public:
  SocketPlace(SocketPlace&& other) noexcept = default;
  SocketPlace& operator=(SocketPlace&& other) noexcept = delete;
  ~SocketPlace();

  // The socket of the socket activation protocol (LISTEN_FDS, LISTEN_PID), or nothing when none was
  // passed to this process. Removes the variables from the environment: they are for nobody else.
  // `first_fd` is 3 but in tests.
  // Errors: kInvalidArgument when several were passed, or when it is not a listening Unix stream
  // socket.
  static Result<std::optional<SocketPlace>> Adopt(int first_fd = 3);

  // Creates the folder (0700) where it is missing, takes the lock `<path>.lock`, removes the socket
  // of a dead daemon and binds. Nothing but a dead socket is ever removed.
  // Errors: kAlreadyRunning with the pid, kInvalidArgument (path too long, not a socket, a
  // symlink), kPermission (folder of somebody else, or writable by others), kSystem.
  static Result<SocketPlace> Bind(const std::string& path);

  [[nodiscard]] int fd() const { return socket_.get(); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  SocketPlace() = default;

  UniqueFd socket_;
  UniqueFd lock_;
  std::string path_;
  ino_t inode_ = 0;  // of the file bound here; 0 for a passed socket
};

}  // namespace modelcache
