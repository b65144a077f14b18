// FakeDaemon: a listening socket whose answers the test decides, lies included.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/unique_fd.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/frame_channel.h"
#include "proto/messages.h"

namespace modelcache {

// One accepted connection, inside its handler.
class FakeSession {
 public:
  explicit FakeSession(UniqueFd socket) : channel_(std::move(socket)) {}

  template <typename Message>
  void Reply(const Frame& request, const Message& message, std::span<const int> descriptors = {}) {
    Send(request, kFlagReply, Encode(message), descriptors);
  }
  void Fail(const Frame& request, ErrorCode code, const std::string& message);
  template <typename Message>
  void Event(const Frame& request, MessageType type, const Message& message) {
    Frame event;
    event.header = request.header;
    event.header.type = type;
    Send(event, kFlagEvent, Encode(message), {});
  }
  // A frame with this request's type and id, any flags and any body.
  void Send(const Frame& request, std::uint8_t flags, std::string_view body,
            std::span<const int> descriptors);
  void SendBytes(std::string_view bytes);
  void HangUp();

  FrameChannel& channel() { return channel_; }

 private:
  FrameChannel channel_;
};

// Serves until destroyed, each connection in a thread of its own.
class FakeDaemon {
 public:
  using Handler = std::function<void(FakeSession& session, const Frame& request)>;

  // Answers hello as `hello` says; everything else goes to `handler`.
  FakeDaemon(const std::string& socket_path, Handler handler);
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;
  ~FakeDaemon();

  // A hello of this process, so that its descriptors can be opened through procfs.
  static HelloReply TruthfulHello();

  // Change before a client connects.
  HelloReply hello = TruthfulHello();

  // While true, a hello gets no answer.
  std::atomic<bool> mute{false};

  // Waits until `count` frames of a type have arrived; false after five seconds.
  bool WaitForFrames(MessageType type, std::size_t count);
  // Waits until this many connections have been closed by their clients.
  bool WaitForHangUps(std::size_t count);
  std::size_t Frames(MessageType type);
  std::size_t Connections();
  std::vector<std::uint64_t> Releases();

 private:
  struct Served {
    int fd = -1;
    std::thread thread;
  };
  void Accept();
  void Serve(UniqueFd socket);
  void Note(const Frame& frame);
  template <typename Predicate>
  bool WaitFor(Predicate predicate);

  Handler handler_;
  UniqueFd listener_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<MessageType, std::size_t> frames_;
  std::vector<std::uint64_t> releases_;
  std::size_t hang_ups_ = 0;
  std::list<Served> sessions_;
  std::thread acceptor_;
};

}  // namespace modelcache
