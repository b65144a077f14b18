// Starting programs in the place of a daemon.
#include "client/autostart.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/core.h"
#include "tests/support/catch.h"
#include "tests/support/temp_dir.h"

using namespace modelcache;

namespace {

std::string WriteScript(const TempDir& dir, const std::string& body) {
  const std::string path = dir.Write("daemon", "#!/bin/sh\n" + body + "\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

std::string Read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Waits for the process to exit. False after five seconds.
bool WaitForExit(const StartedDaemon& daemon) {
  pollfd entry{daemon.process.get(), POLLIN, 0};
  return ::poll(&entry, 1, 5000) == 1;
}

}  // namespace

TEST_CASE("Autostart: the daemon gets the socket, a session and no descriptor of ours", "[unit]") {
  const TempDir dir;
  const int leaked = ::open("/dev/null", O_RDONLY);  // NOLINT(android-cloexec-open): on purpose
  REQUIRE(::setenv("NOTIFY_SOCKET", "/nowhere", 1) == 0);
  const std::string program =
      WriteScript(dir, "echo \"$@\" > " + (dir / "out") + "; ls /proc/$$/fd >> " + (dir / "out") +
                           "; cut -d' ' -f6 /proc/$$/stat >> " + (dir / "out") + "; echo $$ >> " +
                           (dir / "out") + "; echo \"notify=$NOTIFY_SOCKET\" >> " + (dir / "out") +
                           "; echo said >&2");
  Result<StartedDaemon> daemon = StartDaemon(program, dir / "socket");
  REQUIRE(::unsetenv("NOTIFY_SOCKET") == 0);
  (void)::close(leaked);
  REQUIRE(daemon.ok());
  REQUIRE(WaitForExit(*daemon));
  std::istringstream out(Read(dir / "out"));
  std::string line;
  REQUIRE(std::getline(out, line));
  CHECK(line == "--socket " + (dir / "socket"));
  std::vector<std::string> rest;
  while (std::getline(out, line)) {
    rest.push_back(line);
  }
  REQUIRE(rest.size() >= 6);
  CHECK(std::count(rest.begin(), rest.end(), std::to_string(leaked)) == (leaked <= 2 ? 1 : 0));
  CHECK(rest.back() == "notify=");
  CHECK(rest[rest.size() - 2] != rest[rest.size() - 3]);  // not the leader, so no terminal ever
  CHECK(LastLogLine(daemon->log_path) == "said");
}

TEST_CASE("Autostart: a program that cannot be started is named", "[unit]") {
  const TempDir dir;
  const Error missing = StartDaemon(dir / "missing", dir / "socket").error();
  CHECK(missing.code == ErrorCode::kNotFound);
  CHECK_THAT(missing.message, Contains("missing"));
  CHECK(StartDaemon(dir.Write("text", "no program"), dir / "socket").error().code ==
        ErrorCode::kPermission);
}

TEST_CASE("Autostart: a daemon that exits at once is reported with its last words", "[unit]") {
  const TempDir dir;
  ClientOptions options;
  options.socket_path = dir / "socket";
  options.autostart = Autostart::kAlways;
  options.daemon_path = WriteScript(dir, "echo out of luck >&2; exit 3");
  const Error error = Client::Connect(options).error();
  CHECK(error.code == ErrorCode::kUnavailable);
  CHECK_THAT(error.message, Contains("exited at once") && Contains("out of luck"));
}

TEST_CASE("Autostart: the folder of a socket that was named is never made", "[unit]") {
  const TempDir dir;
  ClientOptions options;
  options.autostart = Autostart::kAlways;
  options.daemon_path = WriteScript(dir, "touch " + (dir / "started") + "; exit 3");
  const std::string socket = dir / "run/modelcache/socket";
  std::filesystem::create_directory(dir / "run");
  SECTION("by the caller") {
    options.socket_path = socket;
    const Error error = Client::Connect(options).error();
    CHECK(error.code == ErrorCode::kUnavailable);
    CHECK_THAT(error.message, Contains(socket) && Contains("does not exist"));
  }
  SECTION("by the environment") {
    REQUIRE(::setenv("MODELCACHE_SOCKET", socket.c_str(), 1) == 0);
    const Error error = Client::Connect(options).error();
    REQUIRE(::unsetenv("MODELCACHE_SOCKET") == 0);
    CHECK_THAT(error.message, Contains(socket) && Contains("does not exist"));
  }
  CHECK_FALSE(std::filesystem::exists(dir / "run/modelcache"));
  CHECK_FALSE(std::filesystem::exists(dir / "started"));
}

TEST_CASE("Autostart: the folder of the default socket is made", "[unit]") {
  const TempDir dir;
  const char* before = std::getenv("XDG_RUNTIME_DIR");
  const std::string kept = before != nullptr ? before : "";
  REQUIRE(::setenv("XDG_RUNTIME_DIR", dir.path().c_str(), 1) == 0);
  ClientOptions options;
  options.autostart = Autostart::kAlways;
  options.daemon_path = WriteScript(dir, "touch " + (dir / "started") + "; exit 3");
  const Error error = Client::Connect(options).error();
  REQUIRE((kept.empty() ? ::unsetenv("XDG_RUNTIME_DIR")
                        : ::setenv("XDG_RUNTIME_DIR", kept.c_str(), 1)) == 0);
  CHECK_THAT(error.message, Contains("exited at once"));
  CHECK(std::filesystem::exists(dir / "modelcache"));
  CHECK(std::filesystem::exists(dir / "started"));
}

TEST_CASE("Autostart: the last line of a log, however long the log is", "[unit]") {
  const TempDir dir;
  CHECK(LastLogLine(dir / "none").empty());
  CHECK(LastLogLine(dir.Write("empty", "")).empty());
  CHECK(LastLogLine(dir.Write("lines", "\n\n")).empty());
  CHECK(LastLogLine(dir.Write("open", "one\ntwo")) == "two");
  CHECK(LastLogLine(dir.Write("long", std::string(100'000, 'x') + "\nlast\n\n")) == "last");
  CHECK(LastLogLine(dir.Write("one", std::string(100'000, 'x'))) == std::string(4096, 'x'));
}

TEST_CASE("Autostart: one of two holds the start lock, until it is gone", "[unit]") {
  const TempDir dir;
  StartLock second(dir / "socket");
  {
    StartLock first(dir / "socket");
    CHECK(first.TryTake());
    CHECK(first.TryTake());
    CHECK_FALSE(second.TryTake());
  }
  CHECK(second.TryTake());
}

TEST_CASE("Autostart: the program is what the caller, then the environment says", "[unit]") {
  CHECK(FindDaemonProgram("/told").value() == "/told");
  REQUIRE(::setenv("MODELCACHE_DAEMON", "/named", 1) == 0);
  CHECK(FindDaemonProgram("").value() == "/named");
  REQUIRE(::unsetenv("MODELCACHE_DAEMON") == 0);
}
