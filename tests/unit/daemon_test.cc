// The real daemon against the fake loader: loads, deaths, hostile peers, limits.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <list>
#include <optional>

#include "common/mapping.h"
#include "common/memfd.h"
#include "proto/manifest.h"
#include "server/socket_place.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/temp_dir.h"

namespace modelcache {
namespace {

std::string Slurp(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The exit code; nothing when it does not end, or not by itself.
std::optional<int> ExitOf(Program& program) {
  std::optional<int> status;
  const bool ended = Eventually([&] {
    status = program.TryWait();
    return status.has_value();
  });
  return ended && WIFEXITED(*status) ? std::optional(WEXITSTATUS(*status)) : std::nullopt;
}

struct RunningDaemon {
  // `limits`: shell commands before the start, such as "ulimit -n 32".
  explicit RunningDaemon(std::vector<std::string> more = {}, const std::string& limits = ":") {
    std::vector<std::string> arguments{"/bin/sh",
                                       "-c",
                                       limits + "; exec \"$@\"",
                                       "sh",
                                       MODELCACHE_DAEMON,
                                       "--socket",
                                       socket,
                                       "--loader",
                                       MODELCACHE_FAKE_LOADER,
                                       "--memory-budget",
                                       "64MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    program.emplace(arguments, log);
    ready = Eventually([this] { return TestClient::Connect(socket).has_value(); });
  }

  TestClient Client() { return std::move(*TestClient::Connect(socket)); }

  TempDir folder;
  std::string socket = folder / "run/socket";
  std::string log = folder / "log";
  std::optional<Program> program;
  bool ready = false;
};

TEST_CASE("Daemon: a file is loaded once and handed out sealed", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  const std::string file = daemon.folder.Write("m", "ok payload");
  TestClient client = daemon.Client();
  const auto cold = client.Open(file);
  REQUIRE(cold.ok());
  CHECK_FALSE(cold->hit);
  OpenRequest request;
  request.want_descriptors = true;
  TestClient other = daemon.Client();
  REQUIRE(other.SendOpen(file, request).ok());
  auto frame = other.Receive();
  REQUIRE(frame.ok());
  const auto warm = TestClient::Reply<OpenReply>(std::move(frame));
  REQUIRE(warm.ok());
  CHECK(warm->hit);
  REQUIRE(warm->arenas.size() == 1);

  const std::string procfs = "/proc/" + std::to_string(daemon.program->pid()) + "/fd/" +
                             std::to_string(warm->arenas[0].fd);
  const UniqueFd arena(::open(procfs.c_str(), O_RDONLY | O_CLOEXEC));
  REQUIRE(arena.valid());
  const auto info = InspectMemfd(arena.get());
  REQUIRE(info.ok());
  CHECK(info->inode == warm->arenas[0].inode);
  CHECK(info->size_bytes == warm->arenas[0].size_bytes);
  CHECK(IsSealed(*info));
  const auto map = Mapping::Map(arena.get(), {0, info->size_bytes}, Access::kCopyOnWrite);
  REQUIRE(map.ok());
  const std::string_view bytes(reinterpret_cast<const char*>(map->data()), map->size());
  CHECK(bytes.find("payload") != std::string_view::npos);

  const auto status = client.Status();
  CHECK(status->loads == 1);
  CHECK(status->hits == 1);
  CHECK(status->leases == 2);
  CHECK(status->arena_bytes == 7);
}

TEST_CASE("Daemon: a changed file is a miss that names the change", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  const std::string file = daemon.folder.Write("m", "ok one");
  TestClient client = daemon.Client();
  REQUIRE(client.Open(file).ok());
  (void)daemon.folder.Write("m", "ok three");
  const auto again = client.Open(file);
  REQUIRE(again.ok());
  CHECK_THAT(again->reason, Contains("size of m 6 -> 8 bytes"));
}

TEST_CASE("Daemon: whatever a loader does wrong reaches the client in words", "[unit]") {
  struct Wrong {
    std::string how;
    ErrorCode code;
    std::string message;
  };
  const auto wrong = GENERATE(values<Wrong>({
      {"crash", ErrorCode::kLoaderFailed, "killed by signal 9 (Killed), memory limit?"},
      {"exit", ErrorCode::kLoaderFailed, "status 3; it printed: something on stderr"},
      {"fail", ErrorCode::kBadFile, "needs 72, has 69"},
      {"garbage", ErrorCode::kLoaderFailed, "loader channel"},
      {"hang", ErrorCode::kTimeout, "did not finish"},
      {"mapped", ErrorCode::kInUse, "writable map"},
      {"liar", ErrorCode::kCorrupt, "its header names"},
  }));
  // Only the one that hangs is to meet the limit, however slow the machine.
  RunningDaemon daemon({"--load-timeout", wrong.how == "hang" ? "0.3" : "600"});
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  const auto opened = client.Open(daemon.folder.Write("bad", wrong.how + " x"));
  REQUIRE_FALSE(opened.ok());
  CHECK(opened.error().code == wrong.code);
  CHECK_THAT(opened.error().message, Contains(wrong.message));
  CHECK(Eventually([&] {
    const auto status = client.Status();
    return status.ok() && status->resident_bytes == 0 && status->reserved_bytes == 0;
  }));
  const std::string good = daemon.folder.Write("good", "ok x");
  CHECK(Eventually([&] { return client.Open(good).ok(); }));
}

TEST_CASE("Daemon: a loader inherits nothing but its socket and a clean environment", "[unit]") {
  (void)::setenv("NOTIFY_SOCKET", "/nonexistent/notify", 1);
  (void)::setenv("LISTEN_FDS", "1", 1);
  (void)::setenv("LISTEN_PID", "1", 1);
  RunningDaemon daemon;
  (void)::unsetenv("NOTIFY_SOCKET");
  (void)::unsetenv("LISTEN_FDS");
  (void)::unsetenv("LISTEN_PID");
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  const auto opened = client.Open(daemon.folder.Write("m", "environment x"));
  REQUIRE_FALSE(opened.ok());
  const std::string& told = opened.error().message;
  CHECK_THAT(told, Contains("PATH="));
  CHECK_THAT(told, !Contains("LISTEN_") && !Contains("NOTIFY_SOCKET"));
  CHECK_THAT(told, Contains("fd0\nfd1\nfd2\nfd3"));
  CHECK_THAT(told, !Contains("fd4") && !Contains("fd5"));
}

TEST_CASE("Daemon: kill -9 of a client ends its leases, of the only waiter its load", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient watcher = daemon.Client();
  {
    TestClient holder = daemon.Client();
    REQUIRE(holder.Open(daemon.folder.Write("m", "ok x")).ok());
    CHECK(watcher.Status()->leases == 1);
  }
  CHECK(Eventually([&] { return watcher.Status()->leases == 0; }));
  const std::uint64_t before = watcher.Status()->resident_bytes;
  {
    TestClient waiter = daemon.Client();
    REQUIRE(waiter.SendOpen(daemon.folder.Write("h", "hang x")).ok());
    CHECK(Eventually([&] { return watcher.Status()->reserved_bytes > 0; }));
  }
  CHECK(Eventually([&] {
    const auto status = watcher.Status();
    return status->reserved_bytes == 0 && status->loading == 0 &&
           status->resident_bytes == before && status->clients == 1;
  }));
}

TEST_CASE("Daemon: a withdrawn open ends its load, not its connection", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient watcher = daemon.Client();
  TestClient waiter = daemon.Client();
  REQUIRE(waiter.SendOpen(daemon.folder.Write("h", "hang x")).ok());
  REQUIRE(Eventually([&] { return watcher.Status()->reserved_bytes > 0; }));
  FrameHeader cancel;
  cancel.type = MessageType::kCancel;
  cancel.flags = kFlagEvent;
  cancel.request_id = 2;  // the hello was the first
  const std::string bytes = EncodeFrame(cancel, "{}");
  REQUIRE(SendAll(waiter.fd(), std::as_bytes(std::span(bytes)), {},
                  DeadlineAfter(std::chrono::seconds(5)))
              .ok());
  CHECK(Eventually([&] {
    const auto status = watcher.Status();
    return status->reserved_bytes == 0 && status->loading == 0 && status->clients == 2;
  }));
  CHECK(waiter.Status().ok());  // and no answer to the open came before this one
}

TEST_CASE("Daemon: broken frames end their own connection only", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient good = daemon.Client();
  const auto bytes =
      GENERATE(std::string("GET / HTTP/1.1\r\n\r\n"), std::string(64, '\0'),
               std::string(64, '\xff'), EncodeFrame({}, "{"), EncodeFrame({}, "[]"),
               std::string("MDLC\x01\x02\x00\x00\x01\x00\x00\x00\xff\xff\xff\x7f", 16));
  Result<UniqueFd> hostile = ConnectUnix(daemon.socket);
  REQUIRE(hostile.ok());
  REQUIRE(SendAll(hostile->get(), std::as_bytes(std::span(bytes)), {},
                  DeadlineAfter(std::chrono::seconds(5)))
              .ok());
  CHECK(Eventually([&] {
    std::vector<std::byte> buffer(4096);
    std::vector<UniqueFd> fds;
    const auto received = ReceiveSome(hostile->get(), buffer, fds);
    return received.ok() && received->closed;
  }));
  CHECK(good.Status().ok());
}

TEST_CASE("Daemon: an invalid body is refused and the connection stays", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  for (const char* body : {"", "[]", "{\"files\": 3}", "{\"files\": [{}, {}]}", "\xff\xfe"}) {
    const auto refused = TestClient::Reply<OpenReply>(client.Call(MessageType::kOpen, body));
    REQUIRE_FALSE(refused.ok());
    CHECK((refused.error().code == ErrorCode::kProtocol ||
           refused.error().code == ErrorCode::kInvalidArgument));
  }
  CHECK(client.Status().ok());
}

TEST_CASE("Daemon: what is no readable regular file is refused", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  const std::string file = daemon.folder.Write("m", "ok x");
  OpenRequest request;
  request.files.push_back({"m", file});
  for (const UniqueFd& fd : {UniqueFd(::open(file.c_str(), O_PATH | O_CLOEXEC)),
                             UniqueFd(::open(file.c_str(), O_WRONLY | O_CLOEXEC)),
                             UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
                             UniqueFd(::open("/tmp", O_RDONLY | O_CLOEXEC))}) {
    const int number = fd.get();
    const auto refused = TestClient::Reply<OpenReply>(
        client.Call(MessageType::kOpen, Encode(request), {&number, 1}));
    REQUIRE_FALSE(refused.ok());
    CHECK((refused.error().code == ErrorCode::kPermission ||
           refused.error().code == ErrorCode::kInvalidArgument));
  }
}

TEST_CASE("Daemon: a client that asks and never reads holds up nobody", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient greedy = daemon.Client();
  FrameHeader header;
  header.type = MessageType::kMetrics;
  const std::string frame = EncodeFrame(header, "{}");
  std::size_t sent_bytes = 0;
  while (sent_bytes < (8U << 20U)) {
    const auto some = SendSome(greedy.fd(), std::as_bytes(std::span(frame)), {});
    REQUIRE(some.ok());
    if (*some < frame.size()) {
      break;  // the daemon stopped reading
    }
    sent_bytes += *some;
  }
  CHECK(sent_bytes < (8U << 20U));
  CHECK(daemon.Client().Status().ok());
}

TEST_CASE("Daemon: with few descriptors it refuses in words and lives", "[unit]") {
  // G2: a limit of 32 descriptors and 100 clients.
  RunningDaemon daemon({}, "ulimit -n 32");
  REQUIRE(daemon.ready);
  std::list<TestClient> clients;
  std::size_t served = 0;
  for (int i = 0; i < 100; ++i) {
    Result<UniqueFd> socket = ConnectUnix(daemon.socket);
    REQUIRE(socket.ok());
    TestClient& client = clients.emplace_back(std::move(*socket));
    if (served > 0) {
      // The daemon has met the new connection when it answers others: its hello comes late.
      REQUIRE(clients.front().Status().ok());
      REQUIRE(clients.front().Status().ok());
    }
    const auto hello = TestClient::Reply<HelloReply>(client.Call(
        MessageType::kHello, Encode(HelloRequest{kProtocolVersion, kProtocolVersion, "t"})));
    served += hello.ok() ? 1 : 0;
    if (!hello.ok()) {
      CHECK(hello.error().code == ErrorCode::kLimit);
      CHECK(hello.error().message ==
            "too many clients: limit " + std::to_string(served) + " (RLIMIT_NOFILE)");
    }
  }
  CHECK(served >= 8);
  CHECK(served < 32);
  const auto loaded = clients.front().Open(daemon.folder.Write("m", "ok x"));
  CHECK(loaded.ok());
  clients.clear();
  CHECK(Eventually([&] { return TestClient::Connect(daemon.socket).has_value(); }));
}

TEST_CASE("Daemon: it raises a low limit on descriptors as far as it may", "[unit]") {
  RunningDaemon daemon({}, "ulimit -S -n 32; ulimit -H -n 256");
  REQUIRE(daemon.ready);
  std::list<TestClient> clients;
  for (int i = 0; i < 100; ++i) {
    std::optional<TestClient> client = TestClient::Connect(daemon.socket);
    REQUIRE(client.has_value());
    clients.push_back(std::move(*client));
  }
}

TEST_CASE("Daemon: clients beyond --max-clients are told so", "[unit]") {
  RunningDaemon daemon({"--max-clients", "1"});
  REQUIRE(daemon.ready);
  std::optional<TestClient> only;
  REQUIRE(Eventually([&] {
    only = TestClient::Connect(daemon.socket);
    return only.has_value();
  }));
  Result<UniqueFd> socket = ConnectUnix(daemon.socket);
  REQUIRE(socket.ok());
  TestClient client(std::move(*socket));
  const auto hello = TestClient::Reply<HelloReply>(client.Call(
      MessageType::kHello, Encode(HelloRequest{kProtocolVersion, kProtocolVersion, "t"})));
  REQUIRE_FALSE(hello.ok());
  CHECK(hello.error().message == "too many clients: limit 1 (--max-clients)");
  CHECK(only->Status().ok());
}

TEST_CASE("Daemon: a loader that is no program is refused at the start", "[unit]") {
  TempDir folder;
  Program daemon({MODELCACHE_DAEMON, "--socket", folder / "run/socket", "--loader", folder / "no"},
                 folder / "log");
  CHECK(ExitOf(daemon) == 2);
  CHECK_THAT(Slurp(folder / "log"), Contains("--loader: " + folder / "no" + ": No such file"));
  CHECK_FALSE(std::filesystem::exists(folder / "run"));
}

TEST_CASE("Daemon: its removed socket file comes back, its models stay", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  const std::string file = daemon.folder.Write("m", "ok x");
  TestClient early = daemon.Client();
  REQUIRE(early.Open(file).ok());
  for (int round = 0; round < 2; ++round) {
    REQUIRE(std::filesystem::remove(daemon.socket));
    REQUIRE(Eventually([&] { return TestClient::Connect(daemon.socket).has_value(); }));
    const auto warm = daemon.Client().Open(file);
    REQUIRE(warm.ok());
    CHECK(warm->hit);
    CHECK(early.Status().ok());
  }
}

TEST_CASE("Daemon: it ends when something else takes its socket's place", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  const std::string other = daemon.folder / "run/other";
  std::optional<SocketPlace> living;
  SECTION("by a file") { (void)daemon.folder.Write("run/other", "precious"); }
  SECTION("by another daemon") {
    auto place = SocketPlace::Bind(other);
    REQUIRE(place.ok());
    living.emplace(std::move(*place));
  }
  std::filesystem::rename(other, daemon.socket);
  CHECK(ExitOf(*daemon.program) == 0);
  CHECK_THAT(Slurp(daemon.log), Contains("stopping: the socket file") && Contains(daemon.socket));
  CHECK(std::filesystem::exists(daemon.socket));
  CHECK(ConnectUnix(daemon.socket).ok() == living.has_value());
}

TEST_CASE("Daemon: it ends when the folder of its socket is gone", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  std::filesystem::rename(daemon.folder / "run", daemon.folder / "away");
  CHECK(ExitOf(*daemon.program) == 0);
  CHECK_THAT(Slurp(daemon.log), Contains("folder") && Contains("gone"));
  CHECK_FALSE(std::filesystem::exists(daemon.folder / "run"));
}

TEST_CASE("Daemon: verify, evict and metrics answer through the socket", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  const std::string file = daemon.folder.Write("m", "ok x");
  const auto opened = client.Open(file);
  REQUIRE(opened.ok());
  const std::string model = Encode(ModelRequest{file});
  const auto verified = TestClient::Reply<VerifyReply>(client.Call(MessageType::kVerify, model));
  REQUIRE(verified.ok());
  CHECK(verified->ok);
  const auto held = TestClient::Reply<EmptyReply>(client.Call(MessageType::kEvict, model));
  REQUIRE_FALSE(held.ok());
  CHECK(held.error().code == ErrorCode::kInUse);
  REQUIRE(client.Send(MessageType::kRelease, Encode(ReleaseRequest{opened->lease})).ok());
  CHECK(TestClient::Reply<EmptyReply>(client.Call(MessageType::kEvict, model)).ok());
  CHECK(Eventually([&] { return client.Status()->resident_bytes == 0; }));
  const auto metrics = TestClient::Reply<MetricsReply>(client.Call(MessageType::kMetrics, "{}"));
  REQUIRE(metrics.ok());
  CHECK_THAT(metrics->text, Contains("modelcache_evictions_total 1\n"));
}

TEST_CASE("Daemon: evicted memory is waited for, not refused", "[unit]") {
  RunningDaemon daemon;  // a budget of 64 MiB
  REQUIRE(daemon.ready);
  TestClient client = daemon.Client();
  for (int i = 0; i < 4; ++i) {
    const auto opened = client.Open(
        daemon.folder.Write("m" + std::to_string(i), "ok " + std::string(40U << 20U, 'x')));
    REQUIRE(opened.ok());
    REQUIRE(client.Send(MessageType::kRelease, Encode(ReleaseRequest{opened->lease})).ok());
  }
  const auto status = client.Status();
  CHECK(status->entries == 1);
  CHECK(status->evictions == 3);
  CHECK(status->resident_bytes <= status->memory_budget_bytes);
}

TEST_CASE("Daemon: a signal stops it cleanly and removes the socket", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  TestClient waiter = daemon.Client();
  REQUIRE(waiter.SendOpen(daemon.folder.Write("h", "hang x")).ok());
  REQUIRE(Eventually([&] { return daemon.Client().Status()->loading == 1; }));
  REQUIRE(::kill(daemon.program->pid(), SIGTERM) == 0);
  const auto refused = TestClient::Reply<OpenReply>(waiter.Receive());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnavailable);
  CHECK(ExitOf(*daemon.program) == 0);
  CHECK_FALSE(std::filesystem::exists(daemon.socket));
}

TEST_CASE("Daemon: it is small and maps neither libtorch nor CUDA", "[unit]") {
  RunningDaemon daemon;
  REQUIRE(daemon.ready);
  const std::string process = "/proc/" + std::to_string(daemon.program->pid());
  const std::string maps = Slurp(process + "/maps");
  CHECK_THAT(maps, !Contains("libtorch") && !Contains("libcuda") && !Contains("libc10"));
  const std::string status = Slurp(process + "/status");
  const std::size_t at = status.find("VmRSS:");
  REQUIRE(at != std::string::npos);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(std::stoul(status.substr(at + 6)) < 10U * 1024U);
#endif
}

}  // namespace
}  // namespace modelcache
