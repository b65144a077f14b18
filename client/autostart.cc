// Double fork, session, descriptors and environment of a daemon started by a client.
#include "client/autostart.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "common/socket.h"
#include "common/socket_folder.h"

extern char** environ;

namespace modelcache {
namespace {

constexpr auto kExecTimeout = std::chrono::seconds(5);
constexpr char kDaemonName[] = "modelcached";

bool IsProgram(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         ::access(path.c_str(), X_OK) == 0;
}

// The folder of the file this code was linked into, symlinks resolved; empty when unknown.
std::string OwnFolder() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&IsProgram), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  std::array<char, PATH_MAX> resolved{};
  if (::realpath(info.dli_fname, resolved.data()) == nullptr) {
    return {};
  }
  return FolderOf(resolved.data());
}

std::vector<std::string> DaemonPlaces() {
  std::vector<std::string> places;
  if (const std::string own = OwnFolder(); !own.empty()) {
    // lib/ beside bin/; lib/<triplet>/; the library inside a Python package has no bin.
    places.push_back(own + "/../bin/" + kDaemonName);
    places.push_back(own + "/../../bin/" + kDaemonName);
  }
  const char* path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/local/bin:/usr/bin";
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    if (end > 0) {
      places.push_back(std::string(rest.substr(0, end)) + "/" + kDaemonName);
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return places;
}

// What the service manager meant for this process must not reach the daemon: it would take our
// sockets for its own and answer in our name.
bool IsForServiceManager(std::string_view variable) {
  for (const std::string_view name : {"NOTIFY_SOCKET=", "LISTEN_FDS=", "LISTEN_PID=",
                                      "LISTEN_FDNAMES=", "WATCHDOG_USEC=", "WATCHDOG_PID="}) {
    if (variable.substr(0, name.size()) == name) {
      return true;
    }
  }
  return false;
}

std::vector<char*> DaemonEnvironment() {
  std::vector<char*> variables;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    if (!IsForServiceManager(*variable)) {
      variables.push_back(*variable);
    }
  }
  variables.push_back(nullptr);
  return variables;
}

// What the daemon's process tells its starter. `error` is 0 when the program runs.
struct StartReport {
  pid_t pid = 0;
  int error = 0;
};

// Everything a child needs, made before the fork: afterwards only async-signal-safe calls.
struct StartPlan {
  const char* program = nullptr;
  char* const* arguments = nullptr;
  char* const* environment = nullptr;
  int null_fd = -1;
  int log_fd = -1;
  int report_fd = -1;
};

void CloseFrom(int first) {
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, 0U) == 0) {
    return;
  }
#endif
  const long limit = std::min(::sysconf(_SC_OPEN_MAX), 65536L);
  for (int fd = first; fd < limit; ++fd) {
    (void)::close(fd);
  }
}

void ResetSignals() {
  for (int number = 1; number < NSIG; ++number) {
    (void)::signal(number, SIG_DFL);  // NOLINT(cert-err33-c): fails for SIGKILL and SIGSTOP
  }
  sigset_t none;
  sigemptyset(&none);
  (void)::sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void BecomeDaemon(const StartPlan& plan) {
  // Duplicates above the standard three first: the plan's descriptors may be any numbers.
  const int report = ::fcntl(plan.report_fd, F_DUPFD_CLOEXEC, 16);
  const int null_fd = ::fcntl(plan.null_fd, F_DUPFD_CLOEXEC, 16);
  const int log = ::fcntl(plan.log_fd, F_DUPFD_CLOEXEC, 16);
  (void)::dup2(null_fd, STDIN_FILENO);
  (void)::dup2(log, STDOUT_FILENO);
  (void)::dup2(log, STDERR_FILENO);
  (void)::dup3(report, STDERR_FILENO + 1, O_CLOEXEC);
  CloseFrom(STDERR_FILENO + 2);
  ResetSignals();
  [[maybe_unused]] const int moved = ::chdir("/");
  StartReport message{::getpid(), 0};
  (void)::execve(plan.program, plan.arguments, plan.environment);
  message.error = errno;
  [[maybe_unused]] const auto sent = ::write(STDERR_FILENO + 1, &message, sizeof message);
  ::_exit(127);
}

[[noreturn]] void ForkAgain(const StartPlan& plan) {
  (void)::setsid();
  const pid_t daemon = ::fork();
  if (daemon == 0) {
    BecomeDaemon(plan);
  }
  const StartReport message{daemon, daemon < 0 ? errno : 0};
  [[maybe_unused]] const auto sent = ::write(plan.report_fd, &message, sizeof message);
  ::_exit(0);
}

// Reads the reports until every writer is gone: the daemon's end closes when it execs. A process
// that another thread forked meanwhile may hold the pipe too, hence the limit.
StartReport ReadReports(int fd) {
  StartReport result;
  StartReport message;
  while (WaitReadable(fd, DeadlineAfter(kExecTimeout)).ok()) {
    const ssize_t got = ::read(fd, &message, sizeof message);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got != static_cast<ssize_t>(sizeof message)) {
      break;
    }
    result.pid = message.pid;
    result.error = message.error != 0 ? message.error : result.error;
  }
  return result;
}

Result<StartReport> Fork(StartPlan plan) {
  std::array<int, 2> ends{-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return SystemError("pipe2", errno);
  }
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  plan.report_fd = writer.get();
  const pid_t child = ::fork();
  if (child < 0) {
    return SystemError("fork", errno);
  }
  if (child == 0) {
    ForkAgain(plan);
  }
  writer.Reset();
  const StartReport report = ReadReports(reader.get());
  // A handler of the program may have collected the child already.
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return report;
}

UniqueFd OpenPidfd([[maybe_unused]] pid_t pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  return UniqueFd();
#endif
}

}  // namespace

Result<std::string> FindDaemonProgram(const std::string& told) {
  if (!told.empty()) {
    return told;
  }
  if (const char* named = std::getenv("MODELCACHE_DAEMON"); named != nullptr && *named != '\0') {
    return std::string(named);
  }
  std::string tried;
  for (const std::string& place : DaemonPlaces()) {
    if (IsProgram(place)) {
      return place;
    }
    tried += (tried.empty() ? "" : ", ") + place;
  }
  return Error{ErrorCode::kNotFound, "no modelcached program to start (looked at " + tried + ")",
               0};
}

Result<StartedDaemon> StartDaemon(const std::string& program, const std::string& socket_path) {
  StartedDaemon daemon;
  const UniqueFd null_fd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null_fd.valid()) {
    return SystemError("open /dev/null", errno);
  }
  daemon.log_path = FolderOf(socket_path) + "/log";
  const UniqueFd log(::open(daemon.log_path.c_str(),
                            O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY,
                            0600));
  if (!log.valid()) {
    daemon.log_path.clear();
  }
  std::vector<std::string> texts = {program, "--socket", socket_path};
  std::vector<char*> arguments;
  arguments.reserve(texts.size() + 1);
  for (std::string& text : texts) {
    arguments.push_back(text.data());
  }
  arguments.push_back(nullptr);
  const std::vector<char*> environment = DaemonEnvironment();
  StartPlan plan;
  plan.program = program.c_str();
  plan.arguments = arguments.data();
  plan.environment = environment.data();
  plan.null_fd = null_fd.get();
  plan.log_fd = log.valid() ? log.get() : null_fd.get();
  Result<StartReport> report = Fork(plan);
  if (!report.ok()) {
    return std::move(report).error();
  }
  if (report->error != 0) {
    return SystemError("start " + program, report->error);
  }
  daemon.process = OpenPidfd(report->pid);
  return daemon;
}

bool StartLock::TryTake() {
  if (held_) {
    return true;
  }
  if (!file_.valid()) {
    file_.Reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  }
  // Without a lock file more than one daemon may be started; they settle it among themselves.
  held_ = !file_.valid() || ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0;
  return held_;
}

// By hand: a stream would bring all of the C++ runtime's locales into the library.
std::string LastLogLine(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status = {};
  if (!file.valid() || ::fstat(file.get(), &status) != 0) {
    return {};
  }
  std::array<char, 4096> end{};
  const off_t from = std::max<off_t>(0, status.st_size - static_cast<off_t>(end.size()));
  const ssize_t got = ::pread(file.get(), end.data(), end.size(), from);
  std::string_view text(end.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  while (!text.empty() && text.back() == '\n') {
    text.remove_suffix(1);
  }
  return std::string(text.substr(text.rfind('\n') + 1));
}

}  // namespace modelcache
