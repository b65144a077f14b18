// One inotify descriptor with one watch.
#include "server/socket_watch.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/socket_folder.h"

namespace modelcache {
namespace {

// Whoever removes the whole folder removes the socket first: it is looked at when that is over.
constexpr auto kSettleTime = std::chrono::milliseconds(100);
constexpr std::uint32_t kFolderGone = IN_DELETE_SELF | IN_MOVE_SELF;
constexpr std::uint32_t kEntryChanged = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO;
// The kernel sends these unasked.
constexpr std::uint32_t kAlways = IN_UNMOUNT | IN_Q_OVERFLOW;

}  // namespace

SocketWatch::SocketWatch(boost::asio::io_context& loop, const std::string& path,
                         std::function<void()> on_change)
    : inotify_(loop),
      settle_(loop),
      folder_(FolderOf(path)),
      name_(path.substr(path.rfind('/') + 1)),
      on_change_(std::move(on_change)) {}

Result<void> SocketWatch::Start() {
  if (!inotify_.is_open()) {
    const int fd = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fd < 0) {
      return SystemError("inotify_init1", errno);
    }
    inotify_.assign(fd);
    Wait();
  }
  const int watch = ::inotify_add_watch(inotify_.native_handle(), folder_.c_str(),
                                        kFolderGone | kEntryChanged | IN_ONLYDIR);
  if (watch < 0) {
    return SystemError("inotify_add_watch of " + folder_, errno);
  }
  if (watch_ >= 0 && watch_ != watch) {
    (void)::inotify_rm_watch(inotify_.native_handle(), watch_);  // fails when its folder is gone
  }
  watch_ = watch;
  return {};
}

void SocketWatch::Stop() {
  settle_.cancel();
  boost::system::error_code ignored;
  (void)inotify_.close(ignored);
}

void SocketWatch::Wait() {
  inotify_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                      [this](const boost::system::error_code& error) {
                        if (error) {
                          return;
                        }
                        if (ReadEvents()) {
                          Settle();
                        }
                        Wait();
                      });
}

bool SocketWatch::ReadEvents() {
  alignas(inotify_event) std::array<char, 4096> buffer;
  const ssize_t got = ::read(inotify_.native_handle(), buffer.data(), buffer.size());
  bool concerned = false;
  std::size_t at = 0;
  while (got > 0 && at < static_cast<std::size_t>(got)) {
    inotify_event event;
    std::memcpy(&event, buffer.data() + at, sizeof event);
    const char* entry = buffer.data() + at + sizeof event;
    concerned = concerned || (event.mask & (kFolderGone | kAlways)) != 0 ||
                (event.len > 0 && name_ == entry);
    at += sizeof event + event.len;
  }
  return concerned;
}

void SocketWatch::Settle() {
  if (settling_) {
    return;
  }
  settling_ = true;
  settle_.expires_after(kSettleTime);
  settle_.async_wait([this](const boost::system::error_code& error) {
    settling_ = false;
    if (!error) {
      on_change_();
    }
  });
}

}  // namespace modelcache
