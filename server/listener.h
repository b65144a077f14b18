// Listener: accepts connections, and refuses them in words where it cannot.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <vector>

#include "common/error.h"
#include "common/socket.h"
#include "common/unique_fd.h"

namespace modelcache {

// Event loop thread only. Keeps one descriptor in reserve, so that a connection can be accepted and
// told that descriptors ran out, instead of waiting in the backlog for ever. A refusal answers the
// peer's hello: a socket closed before that would break the peer's send and hide the answer.
class Listener {
 public:
  // Takes a connection, or gives the reason why not; then the peer is told it.
  using OnConnection = std::function<Result<void>(UniqueFd& socket, const PeerCredentials& peer)>;

  // `socket` must be listening and non-blocking, and outlive the listener, which only borrows it.
  Listener(boost::asio::io_context& loop, int socket, OnConnection on_connection);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void Start();
  // Accepts from `socket` from now on, as the constructor's.
  void MoveTo(int socket);
  void Stop();

 private:
  // A connection that is told why it is not taken as soon as it has said hello.
  struct Refused;

  void Wait();
  void WaitAWhile();
  // False when no more can be accepted for now.
  bool AcceptOne();
  bool RefuseWithReserve(int errno_value);
  void Refuse(UniqueFd socket, Error why);
  void Answer(const Refused& refused);
  void OpenReserve();

  boost::asio::posix::stream_descriptor listening_;
  boost::asio::steady_timer pause_;
  OnConnection on_connection_;
  std::vector<std::shared_ptr<Refused>> refused_;  // oldest first
  UniqueFd reserve_;
  bool paused_ = false;
};

}  // namespace modelcache
