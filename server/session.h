// Session: one client's connection, from accept to close.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/ids.h"
#include "common/socket.h"
#include "common/unique_fd.h"
#include "proto/frame.h"
#include "server/frame_stream.h"

namespace modelcache {

// Does the hello itself and hands every later request to its owner. Any defect of the peer ends
// this session only. Event loop thread only; held by shared_ptr by its owner.
class Session final : public std::enable_shared_from_this<Session>, private FrameStream::Owner {
 public:
  class Owner {
   public:
    virtual void OnRequest(SessionId session, Frame frame) = 0;
    // The owner drops the session. Called at most once.
    virtual void OnSessionClosed(SessionId session, const std::string& why) = 0;

   protected:
    ~Owner() = default;
  };
  struct Identity {
    SessionId id;
    std::int64_t daemon_pid = 0;
    std::uint64_t pid_namespace = 0;
    bool own_user = false;  // the peer's user is the daemon's
  };

  Session(boost::asio::io_context& loop, UniqueFd socket, Identity identity, Owner& owner);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // A peer that has not said hello when `hello_timeout` is over is dropped.
  void Start(std::chrono::steady_clock::duration hello_timeout);

  void Send(FrameHeader header, std::string_view body, std::span<const int> descriptors) {
    stream_->Send(header, body, descriptors);
  }

  // True when the peer has taken everything.
  [[nodiscard]] bool idle() const { return stream_->idle(); }
  [[nodiscard]] bool own_user() const { return identity_.own_user; }
  [[nodiscard]] const std::string& program() const { return program_; }

 private:
  void OnFrame(Frame frame) override;
  void OnStreamClosed(const Error& why) override;
  void OnHello(const Frame& frame);
  void Refuse(const Frame& frame, const Error& error);
  void End(const std::string& why);

  boost::asio::io_context& loop_;
  Identity identity_;
  Owner& owner_;
  std::shared_ptr<FrameStream> stream_;
  std::optional<boost::asio::steady_timer> hello_timer_;
  std::string program_;
  bool greeted_ = false;
  bool ended_ = false;
};

}  // namespace modelcache
