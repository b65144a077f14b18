// Adopting, locking, checking and binding.
#include "server/socket_place.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/socket.h"
#include "common/socket_folder.h"

namespace modelcache {
namespace {

constexpr int kBacklog = 4096;  // the kernel lowers it to net.core.somaxconn

std::optional<long> ReadNumber(const char* text) {
  if (text == nullptr) {
    return std::nullopt;
  }
  const std::string_view view = text;
  long number = 0;
  auto [end, failed] = std::from_chars(view.data(), view.data() + view.size(), number);
  return failed == std::errc() && end == view.data() + view.size() ? std::optional(number)
                                                                   : std::nullopt;
}

int SocketOption(int fd, int option) {
  int value = -1;
  socklen_t length = sizeof value;
  return ::getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 ? value : -1;
}

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

Error AlreadyRunning(const std::string& path, std::int64_t pid) {
  return Error{ErrorCode::kAlreadyRunning,
               "already running" + (pid > 0 ? ", pid " + std::to_string(pid) : std::string()) +
                   ": another daemon serves " + path,
               0};
}

std::int64_t PidInLock(int lock) {
  std::array<char, 32> text{};
  const ssize_t got = ::pread(lock, text.data(), text.size() - 1, 0);
  return got > 0 ? std::strtol(text.data(), nullptr, 10) : 0;
}

// Held until the process ends, however it ends. The file stays: removing it would let two starters
// lock two different files of one name.
Result<UniqueFd> TakeLock(const std::string& path) {
  const std::string lock_path = path + ".lock";
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!lock.valid()) {
    const int saved = errno;
    return SystemError("opening " + lock_path, saved);
  }
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return AlreadyRunning(path, PidInLock(lock.get()));
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock.get(), 0) != 0 ||
      ::pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    const int saved = errno;
    return SystemError("writing " + lock_path, saved);
  }
  return lock;
}

// Whether the lock file at the path is still the one this process has locked.
bool HoldsLock(const UniqueFd& lock, const std::string& path) {
  struct stat held = {};
  struct stat there = {};
  return lock.valid() && ::fstat(lock.get(), &held) == 0 &&
         ::lstat((path + ".lock").c_str(), &there) == 0 && held.st_dev == there.st_dev &&
         held.st_ino == there.st_ino;
}

// Removes a socket nobody listens on. REQUIRES the lock.
Result<void> ClearPath(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0) {
    const int saved = errno;
    return saved == ENOENT ? Result<void>() : SystemError("looking at " + path, saved);
  }
  if (!S_ISSOCK(status.st_mode)) {
    return Invalid(path + (S_ISLNK(status.st_mode) ? " is a symlink" : " is not a socket") +
                   "; it was left untouched");
  }
  // A daemon started by socket activation holds no lock.
  Result<UniqueFd> living = ConnectUnix(path);
  if (living.ok()) {
    Result<PeerCredentials> peer = GetPeerCredentials(living->get());
    return AlreadyRunning(path, peer.ok() ? peer->pid : 0);
  }
  if (living.error().code != ErrorCode::kUnavailable) {
    return living.error();
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    const int saved = errno;
    return SystemError("removing the dead socket " + path, saved);
  }
  return {};
}

Result<UniqueFd> BindAndListen(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) {
    return SystemError("socket", errno);
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const mode_t before = ::umask(0177);
  const int bound =
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const int saved = errno;
  (void)::umask(before);
  if (bound != 0) {
    return SystemError("bind to " + path, saved);
  }
  if (::listen(socket.get(), kBacklog) != 0) {
    return SystemError("listen on " + path, errno);
  }
  return socket;
}

}  // namespace

SocketPlace::~SocketPlace() {
  if (socket_.valid() && lock_.valid() && file_ && Look(path_) == file_) {
    (void)::unlink(path_.c_str());
  }
}

std::optional<SocketPlace::FileId> SocketPlace::Look(const std::string& path) {
  struct statx status = {};
  constexpr unsigned kWanted = STATX_TYPE | STATX_INO | STATX_BTIME;
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, kWanted, &status) != 0 ||
      !S_ISSOCK(status.stx_mode)) {
    return std::nullopt;
  }
  FileId file;
  file.device = (std::uint64_t{status.stx_dev_major} << 32U) | status.stx_dev_minor;
  file.inode = status.stx_ino;
  if ((status.stx_mask & STATX_BTIME) != 0) {
    constexpr std::int64_t kNanoseconds = 1'000'000'000;
    file.born_ns = status.stx_btime.tv_sec * kNanoseconds + status.stx_btime.tv_nsec;
  }
  return file;
}

Result<std::optional<SocketPlace>> SocketPlace::Adopt(int first_fd) {
  const std::optional<long> pid = ReadNumber(std::getenv("LISTEN_PID"));
  const std::optional<long> count = ReadNumber(std::getenv("LISTEN_FDS"));
  for (const char* name : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) {
    (void)::unsetenv(name);
  }
  if (!pid || !count || *pid != ::getpid() || *count < 1) {
    return std::optional<SocketPlace>();
  }
  if (*count > 1) {
    return Invalid(std::to_string(*count) + " sockets were passed (LISTEN_FDS), expected 1");
  }
  if (SocketOption(first_fd, SO_DOMAIN) != AF_UNIX ||
      SocketOption(first_fd, SO_TYPE) != SOCK_STREAM ||
      SocketOption(first_fd, SO_ACCEPTCONN) != 1) {
    return Invalid("the passed descriptor " + std::to_string(first_fd) +
                   " is not a listening Unix stream socket");
  }
  SocketPlace place;
  (void)::fcntl(first_fd, F_SETFD, FD_CLOEXEC);
  (void)::fcntl(first_fd, F_SETFL, ::fcntl(first_fd, F_GETFL) | O_NONBLOCK);
  sockaddr_un address{};
  socklen_t length = sizeof address;
  if (::getsockname(first_fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
      length > offsetof(sockaddr_un, sun_path)) {
    const std::size_t bytes = length - offsetof(sockaddr_un, sun_path);
    place.path_.assign(address.sun_path, ::strnlen(address.sun_path, bytes));
  }
  place.socket_.Reset(first_fd);
  place.file_ = Look(place.path_);
  return std::optional<SocketPlace>(std::move(place));
}

Result<SocketPlace> SocketPlace::Bind(const std::string& path) {
  if (auto checked = CheckSocketPath(path); !checked.ok()) {
    return std::move(checked).error();
  }
  SocketPlace place;
  if (auto bound = place.Rebind(path); !bound.ok()) {
    return std::move(bound).error();
  }
  place.path_ = path;
  return place;
}

Result<UniqueFd> SocketPlace::BindAgain() {
  if (!lock_.valid()) {
    return Error{ErrorCode::kUnavailable, "the socket was passed by a service manager", 0};
  }
  const std::string folder = FolderOf(path_);
  if (::access(folder.c_str(), F_OK) != 0) {
    return Error{ErrorCode::kUnavailable, "its folder " + folder + " is gone too", 0};
  }
  return Rebind(path_);
}

Result<UniqueFd> SocketPlace::Rebind(const std::string& path) {
  if (auto prepared = PrepareSocketFolder(path); !prepared.ok()) {
    return std::move(prepared).error();
  }
  UniqueFd taken;
  if (!HoldsLock(lock_, path)) {
    Result<UniqueFd> lock = TakeLock(path);
    if (!lock.ok()) {
      return std::move(lock).error();
    }
    taken = std::move(*lock);
  }
  if (auto cleared = ClearPath(path); !cleared.ok()) {
    return std::move(cleared).error();
  }
  Result<UniqueFd> socket = BindAndListen(path);
  if (!socket.ok()) {
    return std::move(socket).error();
  }
  const std::optional<FileId> file = Look(path);
  if (!file) {
    return Error{ErrorCode::kUnavailable, "the new socket " + path + " vanished at once", 0};
  }
  file_ = file;
  if (taken.valid()) {
    lock_ = std::move(taken);
  }
  return std::exchange(socket_, std::move(*socket));
}

}  // namespace modelcache
