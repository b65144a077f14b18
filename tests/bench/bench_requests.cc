// Warm requests per second: many connections, one outstanding request each, one epoll loop.
//   bench_requests SOCKET FILE CLIENTS SECONDS open|resident|status
// `open` is what the client library sends for a file: kOpen with its descriptor. `resident` names
// the model instead. Each lease is released with the next request, in the same send.
#include <fcntl.h>
#include <sys/epoll.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/socket.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/version.h"

namespace modelcache {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void Fail(std::string_view what, std::string_view why) {
  (void)std::fprintf(stderr, "bench_requests: %.*s: %.*s\n", static_cast<int>(what.size()),
                     what.data(), static_cast<int>(why.size()), why.data());
  std::exit(1);
}

template <typename T>
T Must(Result<T> result, std::string_view what) {
  if (!result.ok()) {
    Fail(what, result.error().message);
  }
  if constexpr (!std::is_void_v<T>) {
    return std::move(result).value();
  }
}

std::string MakeFrame(MessageType type, std::uint8_t flags, std::string_view body,
                      std::uint8_t descriptor_count = 0) {
  FrameHeader header;
  header.type = type;
  header.flags = flags;
  header.request_id = 1;
  header.descriptor_count = descriptor_count;
  return EncodeFrame(header, body);
}

// What every connection sends over and over.
struct Load {
  std::string request;
  std::vector<int> descriptors;
  bool leases = true;
};

Load MakeLoad(const std::string& file, int fd, std::string_view kind) {
  if (kind == "status") {
    return {MakeFrame(MessageType::kStatus, 0, "{}"), {}, false};
  }
  OpenRequest open;
  if (kind == "resident") {
    open.model = file;
    return {MakeFrame(MessageType::kOpen, 0, Encode(open)), {}, true};
  }
  open.files = {{file.substr(file.rfind('/') + 1), file}};
  return {MakeFrame(MessageType::kOpen, 0, Encode(open), 1), {fd}, true};
}

// The number behind "lease" in a reply; decoding all of it would measure this program.
std::uint64_t LeaseOf(std::string_view body) {
  static constexpr std::string_view kKey = "\"lease\":";
  const std::size_t at = body.find(kKey);
  std::uint64_t lease = 0;
  if (at != std::string_view::npos) {
    const char* begin = body.data() + at + kKey.size();
    (void)std::from_chars(begin + (*begin == ' ' ? 1 : 0), body.data() + body.size(), lease);
  }
  return lease;
}

class Connection {
 public:
  Connection(const std::string& path, const Load& load)
      : socket_(Must(ConnectUnix(path), "connect")), load_(load) {
    const HelloRequest hello{kOldestProtocolVersion, kProtocolVersion, "bench_requests"};
    Send(MakeFrame(MessageType::kHello, 0, Encode(hello)), {});
    while (Replies() == 0) {
      Must(WaitReadable(socket_.get(), Clock::now() + std::chrono::seconds(10)), "hello");
    }
    Send(load_.request, load_.descriptors);
  }

  [[nodiscard]] int fd() const { return socket_.get(); }

  // Reads what is there and asks again for each reply. Returns the number of replies.
  std::size_t Step() {
    const std::size_t count = Replies();
    for (std::size_t i = 0; i < count; ++i) {
      std::string bytes;
      if (load_.leases) {
        const std::string body = R"({"lease":)" + std::to_string(lease_) + "}";
        bytes = MakeFrame(MessageType::kRelease, kFlagEvent, body);
      }
      Send(bytes + load_.request, load_.descriptors);
    }
    return count;
  }

 private:
  void Send(const std::string& bytes, std::span<const int> descriptors) {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    Must(SendAll(socket_.get(), std::as_bytes(std::span(bytes)), descriptors, deadline), "send");
  }

  std::size_t Replies() {
    std::array<std::byte, 65536> buffer;
    std::vector<UniqueFd> descriptors;
    const Received got = Must(ReceiveSome(socket_.get(), buffer, descriptors), "receive");
    if (got.closed) {
      Fail("receive", "the daemon closed the connection");
    }
    Must(reader_.Feed(std::span(buffer).first(got.size_bytes), std::move(descriptors)), "frame");
    std::size_t count = 0;
    for (auto frame = Must(reader_.Next(), "frame"); frame; frame = Must(reader_.Next(), "frame")) {
      if (frame->header.IsError()) {
        Fail("reply", frame->body);
      }
      lease_ = LeaseOf(frame->body);
      ++count;
    }
    return count;
  }

  UniqueFd socket_;
  const Load& load_;
  FrameReader reader_;
  std::uint64_t lease_ = 0;
};

struct Options {
  std::string socket;
  std::size_t clients = 0;
  double seconds = 0;
};

int Run(const Options& options, const Load& load) {
  const UniqueFd poll(::epoll_create1(EPOLL_CLOEXEC));
  std::vector<Connection> connections;
  connections.reserve(options.clients);
  for (std::size_t i = 0; i < options.clients; ++i) {
    connections.emplace_back(options.socket, load);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = i;
    if (::epoll_ctl(poll.get(), EPOLL_CTL_ADD, connections.back().fd(), &event) != 0) {
      Fail("epoll_ctl", std::strerror(errno));
    }
  }
  std::array<epoll_event, 64> events;
  std::size_t replies = 0;
  const auto start = Clock::now();
  double elapsed = 0;
  while (elapsed < options.seconds) {
    const int count =
        ::epoll_wait(poll.get(), events.data(), static_cast<int>(events.size()), 1000);
    for (int i = 0; i < count; ++i) {
      replies += connections[events[static_cast<std::size_t>(i)].data.u64].Step();
    }
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  (void)std::printf(R"({"per_second": %.1f, "replies": %zu, "clients": %zu})"
                    "\n",
                    static_cast<double>(replies) / elapsed, replies, options.clients);
  return 0;
}

}  // namespace
}  // namespace modelcache

int main(int argc, char** argv) {
  if (argc != 6) {
    (void)std::fprintf(stderr,
                       "usage: bench_requests SOCKET FILE CLIENTS SECONDS open|resident|status\n");
    return 2;
  }
  const modelcache::UniqueFd file(::open(argv[2], O_RDONLY | O_CLOEXEC));
  const modelcache::Load load = modelcache::MakeLoad(argv[2], file.get(), argv[5]);
  return modelcache::Run(
      {argv[1], std::strtoul(argv[3], nullptr, 10), std::strtod(argv[4], nullptr)}, load);
}
