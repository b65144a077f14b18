// Config, notifications, the socket's place, what loaders get and how they end.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <list>
#include <optional>
#include <utility>

#include "server/config.h"
#include "server/notify.h"
#include "server/process_loader.h"
#include "server/socket_place.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/temp_dir.h"

namespace modelcache {
namespace {

ParsedConfig Parse(std::vector<const char*> arguments, std::uint64_t memory_bytes = 1000) {
  arguments.insert(arguments.begin(), "modelcached");
  return ParseConfig(static_cast<int>(arguments.size()), arguments.data(), memory_bytes);
}

TEST_CASE("Config: sizes have units and limits", "[unit]") {
  CHECK(ParseSize("4096").value() == 4096);
  CHECK(ParseSize("64KiB").value() == 65536);
  CHECK(ParseSize("1.5GiB").value() == 3ULL << 29U);
  CHECK(ParseSize("2 GB").value() == 2'000'000'000ULL);
  for (const char* bad : {"", "x", "-1", "1XB", "nan", "inf", "99999999TiB", "1e3"}) {
    INFO(bad);
    CHECK_FALSE(ParseSize(bad).ok());
  }
  CHECK(ParseBudget("80%", 1000).value() == 800);
  CHECK(ParseBudget("1KiB", 1000).value() == 1024);
  CHECK_FALSE(ParseBudget("0%", 1000).ok());
  CHECK_FALSE(ParseBudget("101%", 1000).ok());
  CHECK_FALSE(ParseBudget("80%", 0).ok());
}

TEST_CASE("Config: defaults, options and usage errors", "[unit]") {
  const ParsedConfig defaults = Parse({});
  REQUIRE(defaults.config);
  CHECK(defaults.config->memory_budget_bytes == 800);
  CHECK(defaults.config->arena_max_bytes == 1U << 30U);
  CHECK_THAT(defaults.config->loader, Contains("/modelcached-loader"));

  const ParsedConfig given = Parse({"--socket", "/s", "--memory-budget", "64MiB", "--arena-max",
                                    "8MiB", "--load-timeout", "1.5", "--max-clients", "7"});
  REQUIRE(given.config);
  CHECK(given.config->socket == "/s");
  CHECK(given.config->memory_budget_bytes == 64U << 20U);
  CHECK(given.config->arena_max_bytes == 8U << 20U);
  CHECK(given.config->load_timeout == std::chrono::milliseconds(1500));
  CHECK(given.config->max_clients == 7);

  for (const std::vector<const char*>& bad :
       std::vector<std::vector<const char*>>{{"--nonsense"},
                                             {"--memory-budget", "much"},
                                             {"--arena-max", "1MiB"},
                                             {"--load-timeout", "0"},
                                             {"--max-clients", "0"},
                                             {"--log-level", "loud"}}) {
    const ParsedConfig refused = Parse(bad);
    CHECK_FALSE(refused.config);
    CHECK(refused.exit_code == 2);
    CHECK_FALSE(refused.text.empty());
  }
  const ParsedConfig version = Parse({"--version"});
  CHECK(version.exit_code == 0);
  CHECK_THAT(version.text, Contains("modelcached"));
}

TEST_CASE("Config: the loader is a program this user may run", "[unit]") {
  TempDir folder;
  const std::string program = folder.Write("loader", "#!/bin/sh\n");
  const auto message = [](const std::string& path) { return CheckLoader(path).error().message; };
  CHECK_THAT(message(program), Contains("--loader: " + program + ": not executable"));
  CHECK(CheckLoader(program).error().code == ErrorCode::kInvalidArgument);
  REQUIRE(::chmod(program.c_str(), 0700) == 0);
  CHECK(CheckLoader(program).ok());
  CHECK_THAT(message(folder.path()), Contains("not a regular file"));
  CHECK_THAT(message(program + "x"), Contains("No such file"));
}

TEST_CASE("Config: a file sets options, the command line wins", "[unit]") {
  TempDir folder;
  const std::string file = folder.Write("config.ini", "memory-budget=\"32MiB\"\nmax-clients=5\n");
  const ParsedConfig parsed = Parse({"--config", file.c_str(), "--max-clients", "6"});
  REQUIRE(parsed.config);
  CHECK(parsed.config->memory_budget_bytes == 32U << 20U);
  CHECK(parsed.config->max_clients == 6);
  const std::string bad = folder.Write("bad.ini", "memory-budgit=1\n");
  CHECK(Parse({"--config", bad.c_str()}).exit_code == 2);
}

TEST_CASE("Config: usable memory is bounded by control groups of both versions", "[unit]") {
  TempDir root;
  namespace fs = std::filesystem;
  fs::create_directories(root / "proc/self");
  fs::create_directories(root / "sys/fs/cgroup/a/b");
  fs::create_directories(root / "sys/fs/cgroup/memory/c");
  (void)root.Write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n");
  CHECK(UsableMemoryBytes(root.path()) == 1000U * 1024U);
  (void)root.Write("proc/self/cgroup", "4:memory:/c\n0::/a/b\n");
  (void)root.Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  CHECK(UsableMemoryBytes(root.path()) == 1000U * 1024U);
  (void)root.Write("sys/fs/cgroup/a/memory.max", "500000\n");  // the parent's counts too
  CHECK(UsableMemoryBytes(root.path()) == 500000);
  (void)root.Write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "400000\n");
  CHECK(UsableMemoryBytes(root.path()) == 400000);
}

// A datagram socket at `address` as a service manager holds it.
UniqueFd ManagerSocket(const std::string& address) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), name.sun_path);
  name.sun_path[0] = address[0] == '@' ? '\0' : address[0];
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    socket.Reset();
  }
  return socket;
}

TEST_CASE("Notify: states reach paths and abstract addresses", "[unit]") {
  TempDir folder;
  const bool abstract = GENERATE(false, true);
  const std::string address =
      abstract ? "@modelcache-test-" + std::to_string(::getpid()) : folder / "notify";
  const UniqueFd manager = ManagerSocket(address);
  REQUIRE(manager.valid());
  (void)::setenv("NOTIFY_SOCKET", address.c_str(), 1);
  const Notifier notifier = Notifier::FromEnvironment();
  CHECK(std::getenv("NOTIFY_SOCKET") == nullptr);
  REQUIRE(notifier.Send("READY=1").ok());
  std::array<char, 64> text{};
  const ssize_t got = ::recv(manager.get(), text.data(), text.size(), MSG_DONTWAIT);
  CHECK(std::string(text.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0))) == "READY=1");
}

TEST_CASE("Notify: nobody to notify is fine, an unusable address is not", "[unit]") {
  CHECK(Notifier("").Send("READY=1").ok());
  CHECK(Notifier("relative").Send("READY=1").error().code == ErrorCode::kInvalidArgument);
  CHECK(Notifier(std::string(200, '/')).Send("READY=1").error().code ==
        ErrorCode::kInvalidArgument);
  CHECK_FALSE(Notifier("/nonexistent/socket").Send("READY=1").ok());
}

TEST_CASE("Loader: the environment is an allow-list", "[unit]") {
  const std::array<const char*, 6> environment{
      "PATH=/bin", "LISTEN_FDS=1", "NOTIFY_SOCKET=/x", "LD_PRELOAD=/evil", "HOME=/h", nullptr};
  CHECK(LoaderEnvironment(environment.data()) == std::vector<std::string>{"PATH=/bin", "HOME=/h"});
}

TEST_CASE("Loader: its end in words", "[unit]") {
  CHECK_FALSE(DescribeLoaderExit(0, "chatter"));
  const auto killed = DescribeLoaderExit(9, "");  // a wait status: signal in the low bits
  REQUIRE(killed);
  CHECK(killed->message == "loader killed by signal 9 (Killed), memory limit?");
  const auto crashed = DescribeLoaderExit(11, std::string(5000, 'x') + "last words\n");
  REQUIRE(crashed);
  CHECK_THAT(crashed->message, Contains("signal 11 (Segmentation fault); it printed: xxx") &&
                                   Contains("last words") && !Contains("memory limit"));
  CHECK(crashed->message.size() < 2200);
}

TEST_CASE("SocketPlace: a dead socket is replaced, a living one is not", "[unit]") {
  TempDir folder;
  const std::string path = folder / "run/socket";
  {
    auto place = SocketPlace::Bind(path);
    REQUIRE(place.ok());
    struct stat status = {};
    REQUIRE(::stat((folder / "run").c_str(), &status) == 0);
    CHECK((status.st_mode & 0777U) == 0700U);
    const auto second = SocketPlace::Bind(path);
    REQUIRE_FALSE(second.ok());
    CHECK(second.error().code == ErrorCode::kAlreadyRunning);
    CHECK_THAT(second.error().message,
               Contains("already running, pid " + std::to_string(::getpid())));
  }
  CHECK_FALSE(std::filesystem::exists(path));
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(path.begin(), path.end(), address.sun_path);
    REQUIRE(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  CHECK(std::filesystem::exists(path));
  CHECK(SocketPlace::Bind(path).ok());
}

TEST_CASE("SocketPlace: a removed file is bound again", "[unit]") {
  TempDir folder;
  const std::string path = folder / "run/socket";
  {
    auto place = SocketPlace::Bind(path);
    REQUIRE(place.ok());
    CHECK(place->Reachable());
    REQUIRE(std::filesystem::remove(path));
    CHECK_FALSE(place->Reachable());
    const int before = place->fd();
    const auto old = place->BindAgain();
    REQUIRE(old.ok());
    CHECK(old->get() == before);
    CHECK(place->Reachable());
    CHECK(ConnectUnix(path).ok());
    CHECK(SocketPlace::Bind(path).error().code == ErrorCode::kAlreadyRunning);
  }
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("SocketPlace: what lies in its place meanwhile stays there", "[unit]") {
  TempDir folder;
  const std::string path = folder / "run/socket";
  std::optional<SocketPlace> place;
  place.emplace(SocketPlace::Bind(path).value());
  std::filesystem::remove_all(folder / "run");
  CHECK_FALSE(place->Reachable());
  CHECK(place->BindAgain().error().code == ErrorCode::kUnavailable);
  SECTION("another daemon") {
    const auto other = SocketPlace::Bind(path);
    REQUIRE(other.ok());
    CHECK_FALSE(place->Reachable());
    CHECK(place->BindAgain().error().code == ErrorCode::kAlreadyRunning);
    place.reset();
    CHECK(ConnectUnix(path).ok());
  }
  SECTION("a file") {
    std::filesystem::create_directory(folder / "run");
    (void)folder.Write("run/socket", "precious");
    CHECK(place->BindAgain().error().code == ErrorCode::kInvalidArgument);
    place.reset();
    CHECK(std::filesystem::file_size(path) == 8);
  }
}

TEST_CASE("SocketPlace: files, links and folders at the path stay untouched", "[unit]") {
  TempDir folder;
  const std::string path = folder / "socket";
  SECTION("a regular file") { (void)folder.Write("socket", "precious"); }
  SECTION("a symlink") { std::filesystem::create_symlink("/tmp/elsewhere", path); }
  SECTION("a folder") { std::filesystem::create_directory(path); }
  const auto place = SocketPlace::Bind(path);
  REQUIRE_FALSE(place.ok());
  CHECK(place.error().code == ErrorCode::kInvalidArgument);
  CHECK(std::filesystem::exists(std::filesystem::symlink_status(path)));
}

TEST_CASE("SocketPlace: a folder that others control is refused", "[unit]") {
  TempDir folder;
  const std::string inner = folder / "run";
  std::filesystem::create_directory(inner);
  SECTION("writable by all") {
    REQUIRE(::chmod(inner.c_str(), 0777) == 0);
    CHECK(SocketPlace::Bind(inner + "/socket").error().code == ErrorCode::kPermission);
  }
  SECTION("a symlink") {
    std::filesystem::create_symlink(inner, folder / "link");
    CHECK(SocketPlace::Bind(folder / "link/socket").error().code == ErrorCode::kInvalidArgument);
  }
  SECTION("of another user") {
    if (::geteuid() == 0) {
      REQUIRE(::chown(inner.c_str(), 12345, 12345) == 0);
      CHECK(SocketPlace::Bind(inner + "/socket").error().code == ErrorCode::kPermission);
    }
  }
  SECTION("missing above") {
    CHECK(SocketPlace::Bind(folder / "a/b/socket").error().code == ErrorCode::kNotFound);
  }
}

TEST_CASE("SocketPlace: paths of 107 bytes work, longer ones are refused first", "[unit]") {
  TempDir folder;
  const std::string base = folder / "";
  const std::string fits = base + std::string(107 - base.size(), 'x');
  CHECK(SocketPlace::Bind(fits).ok());
  const auto longer = SocketPlace::Bind(fits + "x");
  REQUIRE_FALSE(longer.ok());
  CHECK_THAT(longer.error().message, Contains("108 bytes, limit 107"));
}

// Sets the variables of the socket activation protocol.
void Pass(const std::string& pid, const std::string& count) {
  (void)::setenv("LISTEN_PID", pid.c_str(), 1);
  (void)::setenv("LISTEN_FDS", count.c_str(), 1);
}

TEST_CASE("SocketPlace: a passed socket is adopted and its file stays", "[unit]") {
  TempDir folder;
  const std::string path = folder / "socket";
  UniqueFd passed(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  REQUIRE(::bind(passed.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(passed.get(), 5) == 0);
  const std::string me = std::to_string(::getpid());

  Pass("1", "1");  // meant for another process
  CHECK_FALSE(SocketPlace::Adopt(passed.get())->has_value());
  CHECK(std::getenv("LISTEN_FDS") == nullptr);
  Pass(me, "2");
  CHECK_THAT(SocketPlace::Adopt(passed.get()).error().message, Contains("2 sockets"));
  Pass(me, "1");
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  CHECK_THAT(SocketPlace::Adopt(pipe[0]).error().message, Contains("not a listening"));
  (void)::close(pipe[0]);
  (void)::close(pipe[1]);
  Pass(me, "1");
  {
    auto adopted = SocketPlace::Adopt(passed.Release());
    REQUIRE(adopted.ok());
    REQUIRE(adopted->has_value());
    CHECK((*adopted)->path() == path);
    CHECK((*adopted)->Reachable());
    std::filesystem::rename(path, path + ".away");
    CHECK_FALSE((*adopted)->Reachable());
    CHECK((*adopted)->BindAgain().error().code == ErrorCode::kUnavailable);
    std::filesystem::rename(path + ".away", path);
    CHECK((::fcntl((*adopted)->fd(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK(std::filesystem::exists(path));
}

TEST_CASE("SocketPlace: of twenty daemons started at once exactly one stays", "[unit]") {
  // G6, with a dead socket at the path before each round.
  TempDir folder;
  const std::string path = folder / "run/socket";
  for (int round = 0; round < 3; ++round) {
    std::list<Program> daemons;
    for (int i = 0; i < 20; ++i) {
      daemons.emplace_back(std::vector<std::string>{MODELCACHE_DAEMON, "--socket", path, "--loader",
                                                    MODELCACHE_FAKE_LOADER},
                           folder / "log");
    }
    std::size_t running = daemons.size();
    CHECK(Eventually([&] {
      for (Program& daemon : daemons) {
        if (const auto status = daemon.TryWait(); status) {
          CHECK(WEXITSTATUS(*status) == 1);
          --running;
        }
      }
      return running == 1;
    }));
    CHECK(Eventually([&] { return TestClient::Connect(path).has_value(); }));
    daemons.clear();  // kill -9 leaves a dead socket for the next round
    CHECK(std::filesystem::exists(path));
  }
}

}  // namespace
}  // namespace modelcache
