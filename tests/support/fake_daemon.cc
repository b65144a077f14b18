// Threads and sockets of the fake daemon.
#include "tests/support/fake_daemon.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/clock.h"
#include "common/socket.h"
#include "proto/version.h"

namespace modelcache {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);

UniqueFd Listen(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  (void)::unlink(path.c_str());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket.get(), 64) != 0) {
    throw std::runtime_error("cannot listen at " + path);
  }
  return socket;
}

}  // namespace

void FakeSession::Send(const Frame& request, std::uint8_t flags, std::string_view body,
                       std::span<const int> descriptors) {
  FrameHeader header;
  header.type = request.header.type;
  header.request_id = request.header.request_id;
  header.flags = flags;
  (void)channel_.Send(header, body, descriptors, DeadlineAfter(kPatience));
}

void FakeSession::Fail(const Frame& request, ErrorCode code, const std::string& message) {
  Send(request, kFlagReply | kFlagError, Encode(ErrorReply{code, message, 0}), {});
}

void FakeSession::SendBytes(std::string_view bytes) {
  (void)SendAll(channel_.fd(), std::as_bytes(std::span(bytes)), {}, DeadlineAfter(kPatience));
}

void FakeSession::HangUp() { (void)::shutdown(channel_.fd(), SHUT_RDWR); }

FakeDaemon::FakeDaemon(const std::string& socket_path, Handler handler)
    : handler_(std::move(handler)), listener_(Listen(socket_path)) {
  acceptor_ = std::thread([this] { Accept(); });
}

FakeDaemon::~FakeDaemon() {
  (void)::shutdown(listener_.get(), SHUT_RDWR);
  acceptor_.join();
  {
    const std::lock_guard lock(mutex_);
    for (const Served& session : sessions_) {
      (void)::shutdown(session.fd, SHUT_RDWR);
    }
  }
  for (Served& session : sessions_) {
    session.thread.join();
    (void)::close(session.fd);
  }
}

HelloReply FakeDaemon::TruthfulHello() {
  HelloReply hello;
  hello.version = kProtocolVersion;
  hello.daemon_version = kProductVersion;
  hello.daemon_pid = ::getpid();
  hello.pid_namespace = PidNamespace();
  return hello;
}

void FakeDaemon::Accept() {
  while (true) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) {
      return;
    }
    const std::lock_guard lock(mutex_);
    Served& session = sessions_.emplace_back();
    session.fd = ::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0);  // outlives the handler's own
    session.thread = std::thread([this, moved = socket.Release()] { Serve(UniqueFd(moved)); });
  }
}

void FakeDaemon::Serve(UniqueFd socket) {
  FakeSession session(std::move(socket));
  while (true) {
    Result<Frame> frame = session.channel().Receive(kNoDeadline);
    if (!frame.ok()) {
      session.HangUp();
      const std::lock_guard lock(mutex_);
      ++hang_ups_;
      changed_.notify_all();
      return;
    }
    Note(*frame);
    if (frame->header.type == MessageType::kHello) {
      if (!mute) {
        session.Reply(*frame, hello);
      }
    } else if (frame->header.type != MessageType::kRelease) {
      handler_(session, *frame);
    }
  }
}

void FakeDaemon::Note(const Frame& frame) {
  const std::lock_guard lock(mutex_);
  ++frames_[frame.header.type];
  if (frame.header.type == MessageType::kRelease) {
    Result<ReleaseRequest> release = Decode<ReleaseRequest>(frame.body);
    releases_.push_back(release.ok() ? release->lease : 0);
  }
  changed_.notify_all();
}

template <typename Predicate>
bool FakeDaemon::WaitFor(Predicate predicate) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kPatience, predicate);
}

bool FakeDaemon::WaitForFrames(MessageType type, std::size_t count) {
  return WaitFor([&] { return frames_[type] >= count; });
}

bool FakeDaemon::WaitForHangUps(std::size_t count) {
  return WaitFor([&] { return hang_ups_ >= count; });
}

std::size_t FakeDaemon::Frames(MessageType type) {
  const std::lock_guard lock(mutex_);
  return frames_[type];
}

std::size_t FakeDaemon::Connections() {
  const std::lock_guard lock(mutex_);
  return sessions_.size();
}

std::vector<std::uint64_t> FakeDaemon::Releases() {
  const std::lock_guard lock(mutex_);
  return releases_;
}

}  // namespace modelcache
