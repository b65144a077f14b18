// SocketPlace: the daemon's listening socket, passed by a service manager or bound to a path.
#pragma once

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

  // False for a passed socket whose file cannot be seen here (another mount namespace, an abstract
  // name).
  [[nodiscard]] bool has_file() const { return file_.has_value(); }
  // False when something else, or nothing, lies where the socket's file was: no client finds this
  // daemon any more. REQUIRES has_file().
  [[nodiscard]] bool Reachable() const { return Look(path_) == file_; }

  // Makes a new socket at the path after the file of the old one, and nothing else, was removed.
  // Gives the old socket, to be closed when nobody waits on it any more.
  // Errors: those of Bind; kUnavailable when the folder is gone too, or when the socket was passed:
  // only the service manager can bind it again. Then nothing has changed.
  Result<UniqueFd> BindAgain();

  [[nodiscard]] int fd() const { return socket_.get(); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  // Tells a file from a later one at its path, even where inode numbers are used again.
  struct FileId {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::int64_t born_ns = 0;  // 0 where the file system does not say
    bool operator==(const FileId&) const = default;
  };

  SocketPlace() = default;
  // The socket at `path`, or nothing.
  static std::optional<FileId> Look(const std::string& path);
  Result<UniqueFd> Rebind(const std::string& path);

  UniqueFd socket_;
  UniqueFd lock_;  // invalid for a passed socket
  std::string path_;
  std::optional<FileId> file_;
};

}  // namespace modelcache
