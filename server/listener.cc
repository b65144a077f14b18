// accept4, running out of descriptors, refusals.
#include "server/listener.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "proto/codec.h"
#include "proto/frame.h"

namespace modelcache {
namespace {

constexpr int kAcceptsPerWakeup = 32;  // then the sessions get their turn
constexpr auto kPause = std::chrono::milliseconds(100);
constexpr auto kRefusedHelloTimeout = std::chrono::seconds(1);
constexpr std::size_t kMostRefused = 2;  // each holds a descriptor; the oldest makes way

// Sends the refusal of a connection, as an answer to the hello that has arrived, if any.
void SendRefusal(int socket, const Error& error) {
  FrameHeader header;
  header.type = MessageType::kHello;
  header.flags = kFlagReply | kFlagError;
  header.request_id = 1;  // what every client of ours gives its hello, if that is still on its way
  std::array<std::byte, 4096> hello;
  std::vector<UniqueFd> descriptors;
  Result<Received> received = ReceiveSome(socket, hello, descriptors);
  if (received.ok() && received->size_bytes >= kFrameHeaderBytes) {
    auto first = DecodeFrameHeader(
        std::span<const std::byte, kFrameHeaderBytes>(hello.data(), kFrameHeaderBytes));
    header.request_id = first.ok() ? first->request_id : header.request_id;
  }
  const std::string frame = EncodeFrame(header, Encode(ToReply(error)));
  (void)SendSome(socket, std::as_bytes(std::span(frame)), {});
}

}  // namespace

struct Listener::Refused {
  Refused(const boost::asio::steady_timer::executor_type& loop, UniqueFd peer, Error reason)
      : socket(loop, peer.Release()), timer(loop, kRefusedHelloTimeout), why(std::move(reason)) {}

  boost::asio::posix::stream_descriptor socket;
  boost::asio::steady_timer timer;
  Error why;
};

Listener::Listener(boost::asio::io_context& loop, int socket, OnConnection on_connection)
    : listening_(loop, socket), pause_(loop), on_connection_(std::move(on_connection)) {
  OpenReserve();
}

Listener::~Listener() { Stop(); }

void Listener::Start() { Wait(); }

void Listener::MoveTo(int socket) {
  (void)listening_.release();
  listening_.assign(socket);
  if (!paused_) {
    Wait();
  }
}

void Listener::Stop() {
  pause_.cancel();
  while (!refused_.empty()) {
    Answer(*refused_.front());
  }
  if (listening_.is_open()) {
    (void)listening_.release();  // the socket belongs to the caller
  }
}

void Listener::Wait() {
  listening_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                        [this](const boost::system::error_code& error) {
                          if (error) {
                            return;
                          }
                          bool more = true;
                          for (int i = 0; i < kAcceptsPerWakeup && more; ++i) {
                            more = AcceptOne();
                          }
                          if (!paused_ && listening_.is_open()) {
                            Wait();
                          }
                        });
}

// The socket stays readable while nothing can be accepted: waiting for it would spin.
void Listener::WaitAWhile() {
  paused_ = true;
  pause_.expires_after(kPause);
  pause_.async_wait([this](const boost::system::error_code& error) {
    paused_ = false;
    if (!error && listening_.is_open()) {
      OpenReserve();
      Wait();
    }
  });
}

bool Listener::AcceptOne() {
  UniqueFd socket(
      ::accept4(listening_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    switch (errno) {
      case EAGAIN:
        return false;
      case EINTR:
      case ECONNABORTED:
        return true;
      case EMFILE:
      case ENFILE:
        return RefuseWithReserve(errno);
      default:
        WaitAWhile();
        return false;
    }
  }
  Result<PeerCredentials> peer = GetPeerCredentials(socket.get());
  Result<void> taken =
      peer.ok() ? on_connection_(socket, *peer) : Result<void>(std::move(peer).error());
  if (!taken.ok()) {
    Refuse(std::move(socket), std::move(taken).error());
  }
  return true;
}

bool Listener::RefuseWithReserve(int errno_value) {
  reserve_.Reset();
  UniqueFd socket(
      ::accept4(listening_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool accepted = socket.valid();
  if (accepted) {
    Refuse(std::move(socket), SystemError("too many clients: accept", errno_value));
  }
  OpenReserve();  // in vain until the refused one has gone
  if (!accepted || !reserve_.valid()) {
    WaitAWhile();
    return false;
  }
  return true;
}

void Listener::OpenReserve() {
  if (!reserve_.valid()) {
    reserve_.Reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
}

void Listener::Refuse(UniqueFd socket, Error why) {
  if (refused_.size() == kMostRefused) {
    Answer(*refused_.front());
  }
  const auto refused =
      std::make_shared<Refused>(pause_.get_executor(), std::move(socket), std::move(why));
  refused_.push_back(refused);
  const auto answer = [this, refused](const boost::system::error_code& error) {
    if (!error) {
      Answer(*refused);
    }
  };
  refused->socket.async_wait(boost::asio::posix::stream_descriptor::wait_read, answer);
  refused->timer.async_wait(answer);
}

void Listener::Answer(const Refused& refused) {
  const auto found = std::find_if(refused_.begin(), refused_.end(),
                                  [&](const auto& peer) { return peer.get() == &refused; });
  if (found == refused_.end()) {
    return;
  }
  const std::shared_ptr<Refused> peer = std::move(*found);
  refused_.erase(found);
  SendRefusal(peer->socket.native_handle(), peer->why);
  peer->timer.cancel();
  boost::system::error_code ignored;
  (void)peer->socket.close(ignored);
  OpenReserve();
}

}  // namespace modelcache
