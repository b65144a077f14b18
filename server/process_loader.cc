// Spawning, watching and reaping a loader.
#include "server/process_loader.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/socket.h"
#include "proto/codec.h"

namespace modelcache {
namespace {

constexpr int kLoaderSocket = 3;
constexpr int kCollapseNice = 10;

constexpr std::array<std::string_view, 15> kKeptVariables{"PATH=",
                                                          "HOME=",
                                                          "LANG=",
                                                          "LC_ALL=",
                                                          "TMPDIR=",
                                                          "LD_LIBRARY_PATH=",
                                                          "OMP_NUM_THREADS=",
                                                          "CUDA_VISIBLE_DEVICES=",
                                                          "CUDA_HOME=",
                                                          "CUDA_DEVICE_ORDER=",
                                                          "NVIDIA_VISIBLE_DEVICES=",
                                                          "ASAN_OPTIONS=",
                                                          "UBSAN_OPTIONS=",
                                                          "TSAN_OPTIONS=",
                                                          "LSAN_OPTIONS="};

// As exec takes them.
std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) {
    pointers.push_back(text.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

// What posix_spawn takes besides the program; frees what it holds.
class SpawnPlan {
 public:
  SpawnPlan() {
    (void)::posix_spawn_file_actions_init(&actions_);
    (void)::posix_spawnattr_init(&attributes_);
  }
  ~SpawnPlan() {
    (void)::posix_spawn_file_actions_destroy(&actions_);
    (void)::posix_spawnattr_destroy(&attributes_);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;

  // 0 or an errno value. Standard descriptors first: dup2 to 3 may replace one of the sources.
  int Prepare(int socket, int output, const std::string& folder) {
    sigset_t all;
    sigset_t none;
    (void)::sigfillset(&all);
    (void)::sigemptyset(&none);
    int failed = ::posix_spawn_file_actions_addopen(&actions_, 0, "/dev/null", O_RDONLY, 0);
    failed = failed != 0 ? failed : ::posix_spawn_file_actions_adddup2(&actions_, output, 1);
    failed = failed != 0 ? failed : ::posix_spawn_file_actions_adddup2(&actions_, output, 2);
    failed =
        failed != 0 ? failed : ::posix_spawn_file_actions_adddup2(&actions_, socket, kLoaderSocket);
    if (failed == 0 && !folder.empty()) {
      failed = ::posix_spawn_file_actions_addchdir_np(&actions_, folder.c_str());
    }
    failed = failed != 0 ? failed : ::posix_spawnattr_setpgroup(&attributes_, 0);
    failed = failed != 0 ? failed : ::posix_spawnattr_setsigdefault(&attributes_, &all);
    failed = failed != 0 ? failed : ::posix_spawnattr_setsigmask(&attributes_, &none);
    constexpr int kFlags = POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK;
    return failed != 0 ? failed : ::posix_spawnattr_setflags(&attributes_, kFlags);
  }

  // 0 or an errno value.
  int Spawn(Launch& launch, pid_t& pid) {
    const std::vector<char*> arguments = Pointers(launch.arguments);
    const std::vector<char*> variables = Pointers(launch.environment);
    return ::posix_spawn(&pid, arguments.front(), &actions_, &attributes_, arguments.data(),
                         variables.data());
  }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Result<Pipe> MakePipe() {
  std::array<int, 2> ends{-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    return SystemError("pipe2", errno);
  }
  // The loader's end blocks like any other standard output.
  (void)::fcntl(ends[1], F_SETFL, 0);
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

Error StartError(const Launch& launch, int errno_value) {
  const std::string where = launch.folder.empty() ? "" : " in " + launch.folder;
  Error error = SystemError("start of the loader " + launch.arguments.front() + where, errno_value);
  error.code = error.code == ErrorCode::kNotFound ? ErrorCode::kLoaderFailed : error.code;
  return error;
}

void KillGroup(pid_t pid) {
  // The group may not exist yet in the child's first instants; the process always does.
  (void)::kill(-pid, SIGKILL);
  (void)::kill(pid, SIGKILL);
}

// When memory runs out in a group that holds both, the loader is to go, not the cache.
void PreferAsVictim(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/oom_score_adj";
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  constexpr std::string_view kScore = "500";
  (void)!::write(file.get(), kScore.data(), kScore.size());
}

}  // namespace

std::vector<std::string> LoaderEnvironment(const char* const* environment) {
  std::vector<std::string> kept;
  for (const char* const* entry = environment; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    if (std::any_of(kKeptVariables.begin(), kKeptVariables.end(),
                    [&](std::string_view name) { return variable.starts_with(name); })) {
      kept.emplace_back(variable);
    }
  }
  return kept;
}

std::optional<Error> DescribeLoaderExit(int status, const std::string& output) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    return std::nullopt;
  }
  Error error{ErrorCode::kLoaderFailed, "", 0};
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    error.message = "loader killed by signal " + std::to_string(signal) + " (" +
                    ::strsignal(signal) + ")" + (signal == SIGKILL ? ", memory limit?" : "");
  } else {
    error.message = "loader exited with status " + std::to_string(WEXITSTATUS(status));
  }
  constexpr std::size_t kTailBytes = 2048;
  std::string tail = output.substr(output.size() - std::min(output.size(), kTailBytes));
  while (!tail.empty() && tail.back() == '\n') {
    tail.pop_back();
  }
  if (!tail.empty()) {
    error.message += "; it printed: " + tail;
  }
  return error;
}

LoaderProcess::LoaderProcess(boost::asio::io_context& loop, JobId job, Owner& owner)
    : loop_(loop), job_(job), owner_(owner), output_pipe_(loop), pidfd_(loop) {}

LoaderProcess::~LoaderProcess() {
  if (stream_ != nullptr) {
    stream_->Close();
  }
  if (pid_ > 0) {  // only when the daemon ends without waiting for it
    KillGroup(pid_);
    (void)::waitpid(pid_, nullptr, 0);
  }
}

Result<void> LoaderProcess::Start(const std::string& program, const StartJob& job,
                                  std::span<const int> arena_fds) {
  auto sockets = MakeSocketPair();
  if (!sockets.ok()) {
    return std::move(sockets).error();
  }
  Result<Pipe> pipe = MakePipe();
  if (!pipe.ok()) {
    return std::move(pipe).error();
  }
  Launch launch = job.launch.value_or(Launch{{program}, LoaderEnvironment(environ), ""});
  SpawnPlan plan;
  int failed = plan.Prepare(sockets->second.get(), pipe->write.get(), launch.folder);
  failed = failed != 0 ? failed : plan.Spawn(launch, pid_);
  if (failed != 0) {
    pid_ = 0;
    return StartError(launch, failed);
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (!pidfd.valid()) {
    return SystemError("pidfd_open", errno);  // the destructor kills and reaps
  }
  PreferAsVictim(pid_);
  if (job.request.kind == JobKind::kCollapse) {
    (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(pid_), kCollapseNice);
  }
  pidfd_.assign(pidfd.Release());
  output_pipe_.assign(pipe->read.Release());
  StreamLimits limits;
  limits.max_body_bytes = kMaxBodyBytes;
  FrameStream::Owner& owner = *this;
  stream_ = std::make_shared<FrameStream>(loop_, std::move(sockets->first), limits, owner);
  std::vector<int> descriptors;
  for (const UniqueFd& file : job.files) {
    descriptors.push_back(file.get());
  }
  descriptors.insert(descriptors.end(), arena_fds.begin(), arena_fds.end());
  FrameHeader header;
  header.type = MessageType::kJob;
  stream_->Send(header, Encode(job.request), descriptors);
  stream_->Start();
  WaitOutput();
  WaitExit();
  return {};
}

void LoaderProcess::Send(FrameHeader header, std::string_view body,
                         std::span<const int> descriptors) {
  stream_->Send(header, body, descriptors);
}

void LoaderProcess::Kill() {
  if (pid_ > 0) {
    KillGroup(pid_);
  }
}

void LoaderProcess::OnFrame(Frame frame) { owner_.OnLoaderFrame(job_, std::move(frame)); }

void LoaderProcess::OnStreamClosed(const Error& why) {
  if (why.code != ErrorCode::kUnavailable) {
    owner_.OnLoaderBroken(job_, why);
  }
}

void LoaderProcess::WaitOutput() {
  output_pipe_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                          [self = shared_from_this()](const boost::system::error_code& error) {
                            if (!error && self->ReadOutput()) {
                              self->WaitOutput();
                            }
                          });
}

// False at the end of the output. What exceeds the cap is read and dropped, the newest kept.
bool LoaderProcess::ReadOutput() {
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t got = ::read(output_pipe_.native_handle(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return got < 0 && errno == EAGAIN;
    }
    output_.append(buffer.data(), static_cast<std::size_t>(got));
    if (output_.size() > kMaxLoaderOutputBytes) {
      output_.erase(0, output_.size() - kMaxLoaderOutputBytes);
    }
    if (static_cast<std::size_t>(got) < buffer.size()) {
      return true;
    }
  }
}

void LoaderProcess::WaitExit() {
  pidfd_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                    [self = shared_from_this()](const boost::system::error_code& error) {
                      if (!error) {
                        self->OnExit();
                      }
                    });
}

void LoaderProcess::OnExit() {
  // Its children, if any, keep the group alive; the zombie still holds the group's number.
  KillGroup(pid_);
  int status = 0;
  pid_t reaped = -1;
  do {
    reaped = ::waitpid(pid_, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  pid_ = 0;
  stream_->DrainNow();
  (void)ReadOutput();
  stream_->Close();
  boost::system::error_code ignored;
  (void)output_pipe_.close(ignored);
  (void)pidfd_.close(ignored);
  owner_.OnLoaderExit(job_, DescribeLoaderExit(status, output_));
}

}  // namespace modelcache
