// Connection: one socket to the daemon, shared by the threads and models of a client.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/ids.h"
#include "common/result.h"
#include "proto/frame.h"
#include "proto/frame_channel.h"
#include "proto/messages.h"

namespace modelcache {

struct Request {
  MessageType type = MessageType::kHello;
  std::string body;
  std::span<const int> descriptors;
  TimePoint deadline = kNoDeadline;
};

// Gets each event that belongs to a request, in the requesting thread. An answer that is not ok
// gives up waiting with that error.
using EventHandler = std::function<Result<void>(const Frame& event)>;

// Any number of requests may be under way, from any threads: whichever of them waits reads the
// socket for all. Once broken it stays broken; its leases have ended then.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Says hello over a connected socket.
  // Errors: kUnavailable (the daemon hung up), kTimeout, kVersion, kProtocol, kPermission, kSystem.
  static Result<std::shared_ptr<Connection>> Greet(UniqueFd socket, TimePoint deadline);

  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  // Sends the request and waits for its reply. Errors: those the daemon replies, kTimeout,
  // kUnavailable (the connection is broken), kProtocol, kLimit, what `on_event` gives, kSystem.
  // A request that is given up is withdrawn from the daemon, which then need not load for it.
  Result<Frame> Call(const Request& request, const EventHandler& on_event = nullptr);

  // Ends a lease. Never waits for the daemon: what the socket cannot take now goes out before the
  // next request.
  void Release(LeaseId lease);

  // False once the connection is broken or belongs to our parent process.
  [[nodiscard]] bool usable() const;

  [[nodiscard]] const HelloReply& hello() const { return hello_; }

  // The socket, to look at.
  [[nodiscard]] int fd() const { return channel_.fd(); }

  // Whether the daemon's descriptors can be opened through procfs: it lives in our PID namespace,
  // and nothing has failed yet.
  [[nodiscard]] bool procfs_works() const { return procfs_works_; }
  void GiveUpProcfs() { procfs_works_ = false; }

  // In a forked child, before anything else there: closes the child's copy of the socket and makes
  // the object inert for ever. Takes no lock and allocates nothing.
  void AbandonInChild();

 private:
  struct Waiter {
    std::deque<Frame> frames;
    bool answered = false;
  };

  // An event that goes out when the socket has room for it.
  struct Notice {
    MessageType type = MessageType::kRelease;
    std::uint32_t request_id = 0;
    std::string body;
  };

  explicit Connection(UniqueFd socket);
  [[nodiscard]] Result<void> SayHello(TimePoint deadline);
  [[nodiscard]] Result<void> SendFrame(const Request& request, std::uint32_t request_id);
  [[nodiscard]] Result<Frame> NextFrame(Waiter& waiter, TimePoint deadline);
  [[nodiscard]] Result<Frame> Await(Waiter& waiter, const Request& request,
                                    const EventHandler& on_event);
  void Dispatch(Frame frame);
  void ReturnLease(const Frame& frame);
  void Break(Error error);
  void Leave(std::uint32_t request_id, MessageType type, bool sent);
  void FlushNotices();
  [[nodiscard]] std::vector<Notice> TakeNotices();  // a batch the socket surely takes

  FrameChannel channel_;
  HelloReply hello_;
  std::atomic<bool> abandoned_{false};
  std::atomic<bool> procfs_works_{false};
  std::shared_ptr<Connection> self_;  // set in a child, where nothing may destroy the object

  std::mutex send_mutex_;     // one frame at a time; taken before mutex_
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool receiving_ = false;  // one of the waiting threads reads the socket
  std::uint32_t last_id_ = 0;
  std::unordered_map<std::uint32_t, Waiter*> waiters_;
  std::vector<Notice> notices_;
  std::optional<Error> broken_;
};

}  // namespace modelcache
