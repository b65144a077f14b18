// Listener: accepts connections, and refuses them in words where it cannot.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>

#include "common/error.h"
#include "common/socket.h"
#include "common/unique_fd.h"

namespace modelcache {

// Event loop thread only. Keeps one descriptor in reserve, so that a connection can be accepted and
// told that descriptors ran out, instead of waiting in the backlog for ever.
class Listener {
 public:
  // Takes a connection, or gives the reason why not; then the socket is closed after telling it.
  using OnConnection = std::function<Result<void>(UniqueFd& socket, const PeerCredentials& peer)>;

  // `socket` must be listening and non-blocking, and outlive the listener, which only borrows it.
  Listener(boost::asio::io_context& loop, int socket, OnConnection on_connection);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void Start();
  void Stop();

 private:
  void Wait();
  void WaitAWhile();
  // False when no more can be accepted for now.
  bool AcceptOne();
  bool RefuseWithReserve(int errno_value);
  void OpenReserve();

  boost::asio::posix::stream_descriptor listening_;
  boost::asio::steady_timer pause_;
  OnConnection on_connection_;
  UniqueFd reserve_;
  bool paused_ = false;
};

// Sends the refusal of a connection, as an answer to the hello that may have arrived already.
void RefuseConnection(int socket, const Error& error);

}  // namespace modelcache
