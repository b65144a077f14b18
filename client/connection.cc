// Requests and replies of several threads over one socket.
#include "client/connection.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <utility>

#include "client/process_state.h"
#include "common/socket.h"
#include "proto/codec.h"
#include "proto/version.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxQueuedEvents = 64;  // progress nobody has time for is dropped
constexpr std::size_t kNoticeBatch = 64;      // a writable Unix socket has room for more than that
constexpr auto kNoticeTimeout = std::chrono::milliseconds(100);

Error ProtocolError(std::string message) {
  return Error{ErrorCode::kProtocol, "the daemon " + std::move(message), 0};
}

// The error an error frame carries.
Error ErrorOf(const Frame& frame) {
  Result<ErrorReply> reply = Decode<ErrorReply>(frame.body);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  if (reply->code == ErrorCode::kOk) {
    return ProtocolError("sent an error reply that says success");
  }
  return ToError(std::move(*reply));
}

// Whether the daemon's PID names it here too. The kernel translates a peer's PID into our
// namespace, which is quicker than asking procfs; only the PID of whoever made a passed socket says
// nothing.
bool SharesPidNamespace(int socket, const HelloReply& hello) {
  if (hello.pid_namespace == 0) {
    return false;
  }
  const Result<PeerCredentials> peer = GetPeerCredentials(socket);
  const bool same_pid = peer.ok() && peer->pid > 1 && peer->pid == hello.daemon_pid;
  return same_pid || hello.pid_namespace == PidNamespace();
}

bool WritableNow(int socket) {
  pollfd entry{socket, POLLOUT, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLOUT) != 0;
}

}  // namespace

Connection::Connection(UniqueFd socket) : channel_(std::move(socket)) {
  ProcessState::Get().Add(this);
}

Connection::~Connection() { ProcessState::Get().Remove(this); }

Result<std::shared_ptr<Connection>> Connection::Greet(UniqueFd socket, TimePoint deadline) {
  const std::shared_ptr<Connection> connection(new Connection(std::move(socket)));
  if (auto greeted = connection->SayHello(deadline); !greeted.ok()) {
    return std::move(greeted).error();
  }
  return connection;
}

Result<void> Connection::SayHello(TimePoint deadline) {
  HelloRequest hello;
  hello.min_version = kOldestProtocolVersion;
  hello.max_version = kProtocolVersion;
  hello.program = program_invocation_short_name;
  Result<Frame> frame = Call({MessageType::kHello, Encode(hello), {}, deadline});
  if (!frame.ok()) {
    return std::move(frame).error();
  }
  Result<HelloReply> reply = Decode<HelloReply>(frame->body);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  if (reply->version < kOldestProtocolVersion || reply->version > kProtocolVersion) {
    return Error{ErrorCode::kVersion,
                 "the daemon chose protocol version " + std::to_string(reply->version) +
                     ", this client speaks " + std::to_string(kOldestProtocolVersion) + " to " +
                     std::to_string(kProtocolVersion),
                 0};
  }
  hello_ = std::move(*reply);
  procfs_works_ = SharesPidNamespace(channel_.fd(), hello_);
  return {};
}

Result<Frame> Connection::Call(const Request& request, const EventHandler& on_event) {
  if (abandoned_) {
    return Error{ErrorCode::kUnavailable, "the connection belongs to the parent process", 0};
  }
  Waiter waiter;
  std::uint32_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (broken_) {
      return Error{ErrorCode::kUnavailable, broken_->message, broken_->errno_value};
    }
    id = ++last_id_;
    waiters_[id] = &waiter;
  }
  Result<void> sent = SendFrame(request, id);
  const bool sent_ok = sent.ok();
  Result<Frame> reply =
      sent_ok ? Await(waiter, request, on_event) : Result<Frame>(std::move(sent).error());
  Leave(id, request.type, sent_ok);
  return reply;
}

// What the daemon still has for a request that is given up goes back to it.
void Connection::Leave(std::uint32_t request_id, MessageType type, bool sent) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiters_.find(request_id);
    const Waiter waiter = std::move(*found->second);
    waiters_.erase(found);
    if (waiter.answered || !sent) {
      return;
    }
    bool late = false;
    for (const Frame& frame : waiter.frames) {
      late = late || frame.header.IsReply();
      ReturnLease(frame);
    }
    if (!late && (type == MessageType::kOpen || type == MessageType::kVerify)) {
      notices_.push_back({MessageType::kCancel, request_id, Encode(EmptyReply{})});
    }
  }
  FlushNotices();
}

Result<void> Connection::SendFrame(const Request& request, std::uint32_t request_id) {
  FrameHeader header;
  header.type = request.type;
  header.request_id = request_id;
  Result<void> sent;
  {
    const std::lock_guard lock(send_mutex_);
    sent = channel_.Send(header, request.body, request.descriptors, request.deadline);
  }
  if (!sent.ok() && sent.error().code != ErrorCode::kLimit) {
    Break(sent.error());  // part of a frame may have gone out
  }
  FlushNotices();
  return sent;
}

Result<Frame> Connection::Await(Waiter& waiter, const Request& request,
                                const EventHandler& on_event) {
  while (true) {
    Result<Frame> frame = NextFrame(waiter, request.deadline);
    if (!frame.ok()) {
      return frame;
    }
    if (frame->header.IsEvent()) {
      if (on_event) {
        if (auto handled = on_event(*frame); !handled.ok()) {
          return std::move(handled).error();
        }
      }
      continue;
    }
    waiter.answered = true;
    if (frame->header.IsError()) {
      return ErrorOf(*frame);
    }
    if (frame->header.type != request.type) {
      Error error = ProtocolError("answered a request of type " +
                                  std::to_string(static_cast<int>(request.type)) + " with type " +
                                  std::to_string(static_cast<int>(frame->header.type)));
      Break(error);
      return error;
    }
    return frame;
  }
}

Result<Frame> Connection::NextFrame(Waiter& waiter, TimePoint deadline) {
  std::unique_lock lock(mutex_);
  while (waiter.frames.empty()) {
    if (broken_) {
      return *broken_;
    }
    if (receiving_) {
      if (deadline == kNoDeadline) {
        changed_.wait(lock);
      } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout &&
                 waiter.frames.empty()) {
        return Error{ErrorCode::kTimeout, "the daemon did not answer in time", 0};
      }
      continue;
    }
    receiving_ = true;
    lock.unlock();
    Result<Frame> frame = channel_.Receive(deadline);
    if (!frame.ok() && frame.error().code != ErrorCode::kTimeout) {
      Break(frame.error());
    }
    lock.lock();
    receiving_ = false;
    if (frame.ok()) {
      Dispatch(std::move(*frame));
    }
    changed_.notify_all();
    if (!frame.ok()) {
      return std::move(frame).error();
    }
  }
  Frame frame = std::move(waiter.frames.front());
  waiter.frames.pop_front();
  return frame;
}

// REQUIRES mutex_ held.
void Connection::Dispatch(Frame frame) {
  const FrameHeader& header = frame.header;
  const auto found = waiters_.find(header.request_id);
  if (found != waiters_.end() && (header.IsReply() || header.IsEvent())) {
    std::deque<Frame>& frames = found->second->frames;
    if (header.IsReply() || frames.size() < kMaxQueuedEvents) {
      frames.push_back(std::move(frame));
    }
    return;
  }
  ReturnLease(frame);
}

// The answer to an open nobody waits for any more still gave us a lease. REQUIRES mutex_ held.
void Connection::ReturnLease(const Frame& frame) {
  const FrameHeader& header = frame.header;
  if (header.type == MessageType::kOpen && header.IsReply() && !header.IsError()) {
    if (Result<OpenReply> reply = Decode<OpenReply>(frame.body); reply.ok()) {
      notices_.push_back({MessageType::kRelease, 0, Encode(ReleaseRequest{reply->lease})});
    }
  }
}

void Connection::Break(Error error) {
  const std::lock_guard lock(mutex_);
  if (!broken_) {
    broken_ = std::move(error);
  }
  changed_.notify_all();
}

void Connection::Release(LeaseId lease) {
  if (abandoned_) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (broken_) {
      return;
    }
    notices_.push_back({MessageType::kRelease, 0, Encode(ReleaseRequest{lease.value})});
  }
  FlushNotices();
}

std::vector<Connection::Notice> Connection::TakeNotices() {
  const std::lock_guard lock(mutex_);
  const auto first =
      notices_.end() - static_cast<std::ptrdiff_t>(std::min(notices_.size(), kNoticeBatch));
  std::vector<Notice> batch(std::make_move_iterator(first),
                            std::make_move_iterator(notices_.end()));
  notices_.erase(first, notices_.end());
  return batch;
}

// A thread that finds the sender busy leaves its notices to it: the sender looks again after it
// has let go of send_mutex_.
void Connection::FlushNotices() {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (notices_.empty() || broken_) {
        return;
      }
    }
    const std::unique_lock sending(send_mutex_, std::try_to_lock);
    if (!sending.owns_lock() || !WritableNow(channel_.fd())) {
      return;
    }
    for (const Notice& notice : TakeNotices()) {
      FrameHeader header;
      header.type = notice.type;
      header.flags = kFlagEvent;
      header.request_id = notice.request_id;
      auto sent = channel_.Send(header, notice.body, {}, DeadlineAfter(kNoticeTimeout));
      if (!sent.ok()) {
        Break(std::move(sent).error());
        return;
      }
    }
  }
}

bool Connection::usable() const {
  if (abandoned_) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  return !broken_;
}

void Connection::AbandonInChild() {
  abandoned_ = true;
  self_ = weak_from_this().lock();
  (void)::close(channel_.fd());
}

}  // namespace modelcache
