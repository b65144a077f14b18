// Wiring of edges and logic.
#include "server/daemon.h"

#include <sched.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "common/utf8.h"

namespace modelcache {
namespace {

constexpr auto kHelloTimeout = std::chrono::seconds(5);
constexpr auto kMetricsInterval = std::chrono::seconds(5);
constexpr auto kStopTimeout = std::chrono::seconds(3);
constexpr auto kLookAgain = std::chrono::microseconds(100);

TimePoint Now() { return std::chrono::steady_clock::now(); }

// Raises the soft limit on descriptors to the hard one and tells it.
std::size_t DescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    constexpr std::size_t kUsualLimit = 1024;
    return kUsualLimit;
  }
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

JobLimits LimitsOf(const Config& config) {
  JobLimits limits;
  limits.max_queued_descriptors = DescriptorLimit() / 4;
  limits.load_timeout = config.load_timeout;
  limits.arena_max_bytes = config.arena_max_bytes;
  return limits;
}

DaemonFacts FactsOf(const SocketPlace& place) {
  Digest seed;
  // Without random numbers, the time tells one daemon from the next.
  if (::getrandom(seed.bytes.data(), seed.bytes.size(), GRND_NONBLOCK) < 0) {
    const auto started = std::chrono::system_clock::now().time_since_epoch().count();
    std::memcpy(seed.bytes.data(), &started, sizeof started);
  }
  return DaemonFacts{::getpid(), place.path(), Now(), seed};
}

// Leaves enough descriptors for loads.
std::size_t ClientsWithin(std::size_t wanted) {
  constexpr std::size_t kOwnDescriptors = 20;
  const std::size_t limit = DescriptorLimit();
  const std::size_t kept = std::max(kOwnDescriptors, limit / 4);
  return std::min<std::size_t>(wanted, limit > kept ? limit - kept : 1);
}

}  // namespace

Daemon::Daemon(Config config, SocketPlace place, Notifier notifier)
    : config_(std::move(config)),
      place_(std::move(place)),
      notifier_(std::move(notifier)),
      dispatcher_(config_.memory_budget_bytes, planner_, LimitsOf(config_), FactsOf(place_)),
      reaper_([this](ArenaId id) {
        boost::asio::post(loop_, [this, id] { Perform(dispatcher_.OnArenaClosed(id, Now())); });
      }),
      store_(reaper_),
      listener_(loop_, place_.fd(),
                [this](UniqueFd& socket, const PeerCredentials& peer) {
                  return OnConnection(socket, peer);
                }),
      watch_(loop_, place_.path(), [this] { OnSocketChange(); }),
      signals_(loop_, SIGTERM, SIGINT),
      deadline_timer_(loop_),
      metrics_timer_(loop_),
      stop_timer_(loop_),
      max_clients_(ClientsWithin(config_.max_clients)),
      pid_namespace_(PidNamespace()) {}

Daemon::~Daemon() {
  listener_.Stop();
  sessions_.clear();
  loaders_.clear();
}

void Daemon::Run() {
  signals_.async_wait([this](const boost::system::error_code& error, int) {
    if (!error) {
      OnSignal();
    }
  });
  listener_.Start();
  WatchSocket();
  ArmMetrics();
  spdlog::info("serving {} with a memory budget of {} bytes, at most {} clients", place_.path(),
               config_.memory_budget_bytes, max_clients_);
  if (auto sent = notifier_.Send("READY=1\nSTATUS=Serving " + place_.path()); !sent.ok()) {
    spdlog::warn("service manager: {}", sent.error().message);
  }
  RunLoop();
}

// The requests of one open come within microseconds of each other, and waking a sleeping process
// costs more than answering one: the loop looks again for a moment before it sleeps.
void Daemon::RunLoop() {
  TimePoint last = Now();
  while (!loop_.stopped()) {
    bool worked = loop_.poll() > 0;
    if (!worked && Now() - last >= kLookAgain) {
      worked = loop_.run_one() > 0;
    }
    if (worked) {
      last = Now();
    } else {
      (void)::sched_yield();  // whoever asks next may need this processor
    }
  }
}

Result<void> Daemon::OnConnection(UniqueFd& socket, const PeerCredentials& peer) {
  if (peer.uid != ::geteuid() && peer.uid != 0) {
    return Error{ErrorCode::kPermission,
                 "user " + std::to_string(peer.uid) + " may not use the daemon of user " +
                     std::to_string(::geteuid()),
                 0};
  }
  if (sessions_.size() >= max_clients_) {
    const bool few_descriptors = max_clients_ < config_.max_clients;
    return Error{ErrorCode::kLimit,
                 "too many clients: limit " + std::to_string(max_clients_) +
                     (few_descriptors ? " (RLIMIT_NOFILE)" : " (--max-clients)"),
                 0};
  }
  const SessionId id{++last_session_};
  const Session::Identity identity{id, ::getpid(), pid_namespace_, peer.uid == ::geteuid()};
  Session::Owner& owner = *this;
  auto session = std::make_shared<Session>(loop_, std::move(socket), identity, owner);
  sessions_.emplace(id, session);
  dispatcher_.OnConnected();
  session->Start(kHelloTimeout);
  ArmMetrics();
  return {};
}

void Daemon::OnRequest(SessionId session, Frame frame) {
  const auto asking = sessions_.find(session);
  const Peer peer{session, asking != sessions_.end() && asking->second->own_user()};
  Perform(DispatchRequest(dispatcher_, peer, std::move(frame), Now()));
}

void Daemon::OnSessionClosed(SessionId session, const std::string& why) {
  const auto ended = sessions_.find(session);
  if (ended == sessions_.end()) {
    return;
  }
  spdlog::debug("session {} of {} ended: {}", session.value, ended->second->program(), why);
  sessions_.erase(ended);
  Perform(dispatcher_.OnDisconnected(session, Now()));
}

void Daemon::OnLoaderFrame(JobId job, Frame frame) {
  Perform(DispatchLoaderFrame(dispatcher_, job, frame, Now()));
}

void Daemon::OnLoaderBroken(JobId job, const Error& why) {
  Perform(dispatcher_.OnLoaderFailed(
      job, Error{ErrorCode::kLoaderFailed, "loader channel: " + why.message, why.errno_value},
      Now()));
}

void Daemon::OnLoaderExit(JobId job, const std::optional<Error>& error) {
  // The process may be the caller: it goes when the stack is unwound.
  auto ended = loaders_.find(job);
  if (ended != loaders_.end()) {
    boost::asio::post(loop_, [process = ended->second] {});
    loaders_.erase(ended);
  }
  Perform(dispatcher_.OnLoaderExit(job, error, Now()));
}

void Daemon::OnSignal() {
  spdlog::info("stopping on a signal");
  Stop();
}

void Daemon::Stop() {
  Perform(dispatcher_.OnStop(Now()));
  BeginStop();
}

void Daemon::WatchSocket() {
  if (!place_.has_file()) {
    return;
  }
  if (auto watching = watch_.Start(); !watching.ok()) {
    spdlog::warn("a removed socket file will not be noticed: {}", watching.error().message);
  }
}

// Without its file no client finds this daemon. Its models are worth a new file; where it may not
// have one, another daemon is to take its place.
void Daemon::OnSocketChange() {
  if (stopping_) {
    return;
  }
  if (place_.Reachable()) {
    WatchSocket();  // the folder may be another one
    return;
  }
  const Result<UniqueFd> old_socket = place_.BindAgain();
  if (!old_socket.ok()) {
    spdlog::warn("stopping: the socket file {} was removed or replaced; {}", place_.path(),
                 old_socket.error().message);
    Stop();
    return;
  }
  listener_.MoveTo(place_.fd());
  WatchSocket();
  spdlog::warn("the socket file {} was removed; it is there again", place_.path());
}

void Daemon::Perform(Actions actions) {
  for (Action& action : actions) {
    actions_.push_back(std::move(action));
  }
  if (performing_) {
    return;
  }
  performing_ = true;
  while (!actions_.empty()) {
    Action action = std::move(actions_.front());
    actions_.pop_front();
    std::visit([this](auto& what) { Do(what); }, action);
  }
  performing_ = false;
  ArmDeadline();
  ArmMetrics();
  if (stopping_) {
    EndWhenIdle();
  }
}

std::vector<int> Daemon::ArenaFds(const std::vector<ArenaId>& arenas) const {
  std::vector<int> fds;
  fds.reserve(arenas.size());
  for (const ArenaId& arena : arenas) {
    fds.push_back(store_.Fd(arena));
  }
  return fds;
}

void Daemon::Do(SendToClient& action) {
  auto found = sessions_.find(action.session);
  if (found == sessions_.end()) {
    return;
  }
  FrameHeader header;
  header.type = action.type;
  header.flags = action.flags;
  header.request_id = action.request_id;
  const bool is_event = (action.flags & kFlagEvent) != 0;
  if (is_event && !found->second->idle()) {
    return;  // progress that cannot be taken now is stale soon
  }
  const std::vector<int> fds = ArenaFds(action.descriptors);
  found->second->Send(header, EncodeBody(action.body), fds);
}

void Daemon::Do(SendToLoader& action) {
  auto found = loaders_.find(action.job);
  if (found == loaders_.end()) {
    return;
  }
  FrameHeader header;
  header.type = action.type;
  header.flags = action.flags;
  header.request_id = action.request_id;
  const std::vector<int> fds = ArenaFds(action.descriptors);
  found->second->Send(header, EncodeBody(action.body), fds);
}

void Daemon::Do(StartJob& action) {
  std::vector<ArenaId> arenas;
  for (const ArenaSpecRef& arena : action.request.arenas) {
    arenas.push_back(arena.id);
  }
  LoaderProcess::Owner& owner = *this;
  auto loader = std::make_shared<LoaderProcess>(loop_, action.job, owner);
  const std::vector<int> fds = ArenaFds(arenas);
  if (auto started = loader->Start(config_.loader, action, fds); !started.ok()) {
    // Answered from the loop, as an exit would be.
    boost::asio::post(loop_, [this, job = action.job, error = started.error()] {
      Perform(dispatcher_.OnLoaderExit(job, error, Now()));
    });
    return;
  }
  loaders_.emplace(action.job, std::move(loader));
}

void Daemon::Do(CancelJob& action) {
  auto found = loaders_.find(action.job);
  if (found != loaders_.end()) {
    found->second->Kill();
  }
}

void Daemon::Do(CreateArenas& action) {
  Perform(dispatcher_.OnArenasCreated(action.job, store_.Create(action.arenas), Now()));
}

void Daemon::Do(SealArenas& action) {
  Perform(dispatcher_.OnSealed(action.job, store_.Seal(action), Now()));
}

void Daemon::Do(CloseArenas& action) {
  for (const ArenaId& arena : action.arenas) {
    store_.Close(arena);
  }
}

void Daemon::Do(MeasureArenas& action) {
  for (const ArenaId& arena : action.arenas) {
    if (Result<std::uint64_t> bytes = store_.AllocatedBytes(arena); bytes.ok()) {
      dispatcher_.OnArenaMeasured(arena, *bytes);
    }
  }
}

void Daemon::Do(Note& action) {
  spdlog::log(action.level == Note::Level::kInfo ? spdlog::level::info : spdlog::level::warn, "{}",
              Printable(action.text));
}

void Daemon::Do(StopDaemon&) {
  spdlog::info("stopping on request");
  BeginStop();
}

void Daemon::ArmDeadline() {
  const TimePoint next = dispatcher_.NextDeadline();
  if (next == armed_for_) {
    return;
  }
  armed_for_ = next;
  if (next == kNoDeadline) {
    deadline_timer_.cancel();
    return;
  }
  deadline_timer_.expires_at(next);
  deadline_timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) {
      armed_for_ = kNoDeadline;
      Perform(dispatcher_.OnTick(Now()));
    }
  });
}

void Daemon::ArmMetrics() {
  if (config_.metrics.empty() || metrics_armed_) {
    return;
  }
  metrics_armed_ = true;
  metrics_timer_.expires_after(kMetricsInterval);
  metrics_timer_.async_wait([this](const boost::system::error_code& error) {
    metrics_armed_ = false;
    if (!error) {
      WriteMetrics();
    }
  });
}

// Readers of the file see the old text or the new one, never a part.
void Daemon::WriteMetrics() {
  const std::string temporary = config_.metrics + ".new";
  std::ofstream file(temporary, std::ios::trunc);
  file << dispatcher_.MetricsText(Now());
  file.close();
  if (!file || std::rename(temporary.c_str(), config_.metrics.c_str()) != 0) {
    spdlog::warn("writing the metrics to {} failed", config_.metrics);
  }
}

void Daemon::BeginStop() {
  if (stopping_) {
    return;
  }
  stopping_ = true;
  if (auto sent = notifier_.Send("STOPPING=1"); !sent.ok()) {
    spdlog::warn("service manager: {}", sent.error().message);
  }
  listener_.Stop();
  watch_.Stop();
  stop_timer_.expires_after(kStopTimeout);
  stop_timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) {
      loop_.stop();
    }
  });
  boost::asio::post(loop_, [this] { EndWhenIdle(); });
}

// Replies that are on their way out and loaders that are being killed get a moment.
void Daemon::EndWhenIdle() {
  const bool flushed = std::all_of(sessions_.begin(), sessions_.end(),
                                   [](const auto& entry) { return entry.second->idle(); });
  if (flushed && loaders_.empty()) {
    loop_.stop();
  }
}

}  // namespace modelcache
