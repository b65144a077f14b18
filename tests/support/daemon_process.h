// DaemonProcess: a real modelcached with the fake loader, and a client that speaks the protocol.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/socket.h"
#include "proto/codec.h"
#include "proto/frame_channel.h"
#include "proto/version.h"

namespace modelcache {

// Polls until `condition` holds; false after ten seconds. For states of other processes, which
// nothing announces.
inline bool Eventually(const std::function<bool()>& condition) {
  const TimePoint deadline = DeadlineAfter(std::chrono::seconds(10));
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

// Runs a program to its end or until killed; what it prints goes to `output`.
class Program {
 public:
  Program(std::vector<std::string> arguments, const std::string& output) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) {
      pointers.push_back(argument.data());
    }
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    (void)::posix_spawn_file_actions_init(&actions);
    (void)::posix_spawn_file_actions_addopen(&actions, 2, output.c_str(),
                                             O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (::posix_spawnp(&pid_, pointers[0], &actions, nullptr, pointers.data(), environ) != 0) {
      pid_ = -1;
    }
    (void)::posix_spawn_file_actions_destroy(&actions);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (pid_ > 0) {
      (void)::kill(pid_, SIGKILL);
      (void)Wait();
    }
  }

  [[nodiscard]] pid_t pid() const { return pid_; }

  // The exit status as waitpid gives it, once it has ended.
  std::optional<int> TryWait() {
    int status = 0;
    if (pid_ <= 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) {
      return std::nullopt;
    }
    pid_ = -1;
    return status;
  }
  int Wait() {
    int status = 0;
    (void)::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  pid_t pid_ = -1;
};

// One connection.
class TestClient {
 public:
  static std::optional<TestClient> Connect(const std::string& path) {
    Result<UniqueFd> socket = ConnectUnix(path);
    if (!socket.ok()) {
      return std::nullopt;
    }
    TestClient client(std::move(*socket));
    Result<Frame> hello = client.Call(
        MessageType::kHello, Encode(HelloRequest{kProtocolVersion, kProtocolVersion, "test"}));
    if (!hello.ok() || hello->header.IsError()) {
      return std::nullopt;
    }
    return client;
  }

  explicit TestClient(UniqueFd socket) : channel_(std::move(socket)) {}

  Result<Frame> Call(MessageType type, std::string_view body, std::span<const int> fds = {}) {
    if (auto sent = Send(type, body, fds); !sent.ok()) {
      return std::move(sent).error();
    }
    return Receive();
  }
  Result<void> Send(MessageType type, std::string_view body, std::span<const int> fds = {}) {
    FrameHeader header;
    header.type = type;
    header.request_id = ++last_id_;
    return channel_.Send(header, body, fds, DeadlineAfter(std::chrono::seconds(10)));
  }
  Result<Frame> Receive() { return channel_.Receive(DeadlineAfter(std::chrono::seconds(10))); }

  // Sends an open of a file without waiting for the answer.
  Result<void> SendOpen(const std::string& path, OpenRequest request = {}) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    const int fd = file.get();
    request.files.push_back({path.substr(path.rfind('/') + 1), path});
    return Send(MessageType::kOpen, Encode(request), {&fd, 1});
  }
  // The reply, or the daemon's refusal.
  Result<OpenReply> Open(const std::string& path, OpenRequest request = {}) {
    if (auto sent = SendOpen(path, std::move(request)); !sent.ok()) {
      return std::move(sent).error();
    }
    return Reply<OpenReply>(Receive());
  }
  Result<StatusReply> Status() { return Reply<StatusReply>(Call(MessageType::kStatus, "{}")); }

  template <typename Body>
  static Result<Body> Reply(Result<Frame> frame) {
    if (!frame.ok()) {
      return std::move(frame).error();
    }
    if (frame->header.IsError()) {
      ErrorReply error = Decode<ErrorReply>(frame->body).value();
      return Error{error.code, std::move(error.message), error.errno_value};
    }
    return Decode<Body>(frame->body);
  }

  [[nodiscard]] int fd() const { return channel_.fd(); }

 private:
  FrameChannel channel_;
  std::uint32_t last_id_ = 0;
};

}  // namespace modelcache
