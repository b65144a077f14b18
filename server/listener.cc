// accept4, running out of descriptors, refusals.
#include "server/listener.h"

#include <fcntl.h>
#include <sys/socket.h>

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

}  // namespace

Listener::Listener(boost::asio::io_context& loop, int socket, OnConnection on_connection)
    : listening_(loop, socket), pause_(loop), on_connection_(std::move(on_connection)) {
  OpenReserve();
}

Listener::~Listener() { Stop(); }

void Listener::Start() { Wait(); }

void Listener::Stop() {
  pause_.cancel();
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
    RefuseConnection(socket.get(), taken.error());
  }
  return true;
}

bool Listener::RefuseWithReserve(int errno_value) {
  reserve_.Reset();
  UniqueFd socket(
      ::accept4(listening_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool accepted = socket.valid();
  if (accepted) {
    RefuseConnection(socket.get(),
                     SystemError("accept: the daemon cannot take another client", errno_value));
    socket.Reset();
  }
  OpenReserve();
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

void RefuseConnection(int socket, const Error& error) {
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

}  // namespace modelcache
