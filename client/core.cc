// Connecting, reconnecting, opening.
#include "client/core.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "client/attach.h"
#include "client/autostart.h"
#include "client/process_state.h"
#include "common/socket.h"
#include "common/socket_folder.h"

namespace modelcache {
namespace {

using std::chrono::milliseconds;

constexpr auto kExitGrace = std::chrono::seconds(1);  // another daemon may be about to listen
constexpr auto kDescriptorTimeout = std::chrono::seconds(10);
constexpr std::uint32_t kDescriptorBatch = 16;  // few enough for a small descriptor limit
constexpr auto kFirstPause = milliseconds(1);
constexpr auto kLongestPause = milliseconds(20);

Result<std::uint64_t> LoadTimeoutMs(std::uint64_t told_ms) {
  const char* text = std::getenv("MODELCACHE_LOAD_TIMEOUT");
  if (told_ms != 0 || text == nullptr || *text == '\0') {
    return told_ms;
  }
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !std::isfinite(seconds) || seconds < 0 || seconds > 1e9) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string("MODELCACHE_LOAD_TIMEOUT is '") + text + "', expected seconds", 0};
  }
  return static_cast<std::uint64_t>(std::ceil(seconds * 1000));
}

TimePoint ReplyDeadline(std::uint64_t timeout_ms) {
  constexpr std::uint64_t kForEver = std::uint64_t{1} << 50U;
  return timeout_ms == 0 || timeout_ms > kForEver
             ? kNoDeadline
             : DeadlineAfter(milliseconds(timeout_ms) + kReplyGrace);
}

// Where the arenas of one reply are opened: through procfs, else by descriptors from the daemon.
class ArenaSource {
 public:
  ArenaSource(Connection& connection, const OpenReply& reply, std::vector<UniqueFd> received,
              TimePoint deadline)
      : connection_(connection),
        reply_(reply),
        received_(std::move(received)),
        deadline_(std::min(deadline, DeadlineAfter(kDescriptorTimeout))) {
    received_.resize(reply.arenas.size());
  }

  Result<UniqueFd> Open(std::size_t index) {
    if (received_[index].valid()) {
      return std::move(received_[index]);
    }
    if (connection_.procfs_works()) {
      Result<UniqueFd> fd =
          OpenThroughProcfs(connection_.hello().daemon_pid, reply_.arenas[index].fd);
      if (fd.ok() || fd.error().code == ErrorCode::kLimit) {
        return fd;
      }
      connection_.GiveUpProcfs();  // hidepid, another user, not dumpable, …
    }
    if (auto fetched = Fetch(index, kDescriptorBatch); !fetched.ok()) {
      return std::move(fetched).error();
    }
    return std::move(received_[index]);
  }

 private:
  Result<void> Fetch(std::size_t first, std::uint32_t most) {
    ArenaDescriptorsRequest request;
    request.lease = reply_.lease;
    request.first = static_cast<std::uint32_t>(first);
    request.count =
        static_cast<std::uint32_t>(std::min<std::size_t>(most, reply_.arenas.size() - first));
    Result<Frame> frame =
        connection_.Call({MessageType::kArenaDescriptors, Encode(request), {}, deadline_});
    if (!frame.ok()) {
      return std::move(frame).error();
    }
    if (frame->DescriptorsMissing()) {
      Error error = frame->MissingDescriptorsError();
      frame->descriptors.clear();
      return most > 1 ? Fetch(first, 1) : Result<void>(std::move(error));
    }
    if (frame->descriptors.size() != request.count) {
      return Error{ErrorCode::kProtocol,
                   "the daemon sent " + std::to_string(frame->descriptors.size()) +
                       " arena descriptors, asked for " + std::to_string(request.count),
                   0};
    }
    std::move(frame->descriptors.begin(), frame->descriptors.end(),
              received_.begin() + static_cast<std::ptrdiff_t>(first));
    return {};
  }

  Connection& connection_;
  const OpenReply& reply_;
  std::vector<UniqueFd> received_;
  TimePoint deadline_;
};

// Descriptors that came with the reply; none unless there is one for each arena.
std::vector<UniqueFd> ReceivedDescriptors(Frame& frame, const OpenReply& reply) {
  std::vector<UniqueFd> descriptors = std::move(frame.descriptors);
  if (descriptors.size() != reply.arenas.size()) {
    descriptors.clear();
  }
  return descriptors;
}

Result<void> HandleProgress(const Frame& frame, const OpenOptions& options) {
  if (frame.header.type != MessageType::kProgress || !options.progress) {
    return {};
  }
  Result<ProgressEvent> event = Decode<ProgressEvent>(frame.body);
  if (!event.ok()) {
    return std::move(event).error();
  }
  if (!options.progress(*event)) {
    return Error{ErrorCode::kCancelled, "the caller gave up waiting for the model", 0};
  }
  return {};
}

// The default folder may have been made by anybody (it can lie in /tmp); a socket that the user
// named is the user's own choice.
Result<void> CheckPeer(int socket, const std::string& path) {
  Result<PeerCredentials> peer = GetPeerCredentials(socket);
  if (!peer.ok()) {
    return std::move(peer).error();
  }
  if (peer->uid != ::geteuid() && peer->uid != 0) {
    return Error{ErrorCode::kPermission,
                 "the daemon at " + path + " belongs to user " + std::to_string(peer->uid) +
                     ", neither to user " + std::to_string(::geteuid()) + " nor to root",
                 0};
  }
  return {};
}

// What the daemon has under another name than the caller asked for must not go unnoticed.
void NoteOtherName(OpenReply& reply, const std::string& asked) {
  if (!asked.empty() && reply.name != asked) {
    reply.reason += " as '" + reply.name + "'; the name '" + asked + "' was not given to it";
  }
}

// Starts a daemon at most once and watches it while its client waits for it.
class Starter {
 public:
  // `may_make_folder`: whether the socket's folder is made where it is missing.
  Starter(const std::string& socket_path, const std::string& program, bool may_make_folder)
      : socket_path_(socket_path),
        program_(program),
        may_make_folder_(may_make_folder),
        lock_(socket_path) {}

  // One step. True when the daemon was started by it.
  Result<bool> Step() {
    if (started_) {
      return CheckAlive();
    }
    if (!prepared_) {
      if (auto folder = PrepareFolder(); !folder.ok()) {
        return std::move(folder).error();
      }
      prepared_ = true;
    }
    const bool held_before = held_;
    held_ = lock_.TryTake();
    if (!held_ || !held_before) {
      return false;  // whoever held it may have a daemon by now: connect once more first
    }
    Result<std::string> program = FindDaemonProgram(program_);
    if (!program.ok()) {
      return std::move(program).error();
    }
    Result<StartedDaemon> daemon = StartDaemon(*program, socket_path_);
    if (!daemon.ok()) {
      return std::move(daemon).error();
    }
    started_ = std::move(*daemon);
    return true;
  }

  [[nodiscard]] std::string Log() const {
    if (!started_ || started_->log_path.empty()) {
      return "";
    }
    return "; " + started_->log_path + " ends: " + LastLogLine(started_->log_path);
  }

 private:
  // A mistyped path must not become a folder with a daemon in it.
  Result<void> PrepareFolder() const {
    if (may_make_folder_) {
      return PrepareSocketFolder(socket_path_);
    }
    Result<void> checked = CheckSocketFolder(socket_path_);
    if (!checked.ok() && checked.error().code == ErrorCode::kNotFound) {
      return Error{ErrorCode::kUnavailable,
                   "no daemon answers at " + socket_path_ + ", and none was started: the folder " +
                       FolderOf(socket_path_) + " does not exist",
                   checked.error().errno_value};
    }
    return checked;
  }

  Result<bool> CheckAlive() {
    if (!started_->process.valid() || exit_deadline_ == kNoDeadline) {
      pollfd entry{started_->process.get(), POLLIN, 0};
      if (started_->process.valid() && ::poll(&entry, 1, 0) == 1) {
        exit_deadline_ = DeadlineAfter(kExitGrace);
      }
      return false;
    }
    if (std::chrono::steady_clock::now() < exit_deadline_) {
      return false;
    }
    return Error{ErrorCode::kUnavailable,
                 "the daemon that was started for " + socket_path_ + " exited at once" + Log(), 0};
  }

  const std::string& socket_path_;
  const std::string& program_;
  bool may_make_folder_;
  StartLock lock_;
  bool prepared_ = false;
  bool held_ = false;
  std::optional<StartedDaemon> started_;
  TimePoint exit_deadline_ = kNoDeadline;
};

}  // namespace

Result<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  const char* named = std::getenv("MODELCACHE_SOCKET");
  const bool told = !options.socket_path.empty() || (named != nullptr && *named != '\0');
  if (options.socket_path.empty()) {
    Result<std::string> path = DefaultSocketPath();
    if (!path.ok()) {
      return std::move(path).error();
    }
    options.socket_path = std::move(*path);
  }
  if (auto checked = CheckSocketPath(options.socket_path); !checked.ok()) {
    return std::move(checked).error();
  }
  options.socket_path = AbsolutePath(options.socket_path);
  const TimePoint deadline = DeadlineAfter(options.timeout);
  std::unique_ptr<Client> client(new Client(std::move(options), told));
  Result<std::shared_ptr<Connection>> connection = client->Connected(deadline);
  if (!connection.ok()) {
    return std::move(connection).error();
  }
  return client;
}

Result<HelloReply> Client::Hello() {
  Result<std::shared_ptr<Connection>> connection = Connected(ConnectDeadline(kNoDeadline));
  return connection.ok() ? Result<HelloReply>((*connection)->hello())
                         : Result<HelloReply>(std::move(connection).error());
}

Result<std::unique_ptr<Model>> Client::Open(const std::vector<std::string>& paths,
                                            const OpenOptions& options) {
  Result<ModelFiles> files = OpenModelFiles(paths);
  if (!files.ok()) {
    return std::move(files).error();
  }
  return Open(*files, options);
}

Result<std::unique_ptr<Model>> Client::Open(const ModelFiles& files, const OpenOptions& options) {
  OpenRequest request;
  request.files = files.files;
  return OpenWith(std::move(request), files, options);
}

Result<std::unique_ptr<Model>> Client::OpenResident(const std::string& model,
                                                    const OpenOptions& options) {
  if (model.empty()) {
    return Error{ErrorCode::kInvalidArgument, "the name of the model is empty", 0};
  }
  return AskForModel(model, [&](const std::string& reference) {
    OpenRequest request;
    request.model = reference;
    return OpenWith(std::move(request), {}, options);
  });
}

Result<std::unique_ptr<Model>> Client::OpenWith(OpenRequest request, const ModelFiles& files,
                                                const OpenOptions& options) {
  Result<std::uint64_t> timeout_ms = LoadTimeoutMs(options.timeout_ms);
  if (!timeout_ms.ok()) {
    return std::move(timeout_ms).error();
  }
  const TimePoint deadline = ReplyDeadline(*timeout_ms);
  Result<std::shared_ptr<Connection>> connection = Connected(ConnectDeadline(deadline));
  if (!connection.ok()) {
    return std::move(connection).error();
  }
  // What is sent may hold secrets; what comes back may come from another daemon after a reconnect.
  if (auto trusted = CheckTrust(**connection, options); !trusted.ok()) {
    return std::move(trusted).error();
  }
  request.name = options.name;
  request.format = options.format;
  request.device = options.device;
  request.pin = options.pin;
  request.count_hit = options.count_hit;
  request.timeout_ms = *timeout_ms;
  request.want_progress = options.progress != nullptr;
  request.want_descriptors = !(*connection)->procfs_works();
  std::vector<int> descriptors;
  for (const UniqueFd& fd : files.descriptors) {
    descriptors.push_back(fd.get());
  }
  const Request call{MessageType::kOpen, Encode(request), descriptors, deadline};
  if (call.body.size() > kMaxRequestBytes) {
    return Error{ErrorCode::kLimit,
                 "a request of " + std::to_string(call.body.size()) + " bytes, limit " +
                     std::to_string(kMaxRequestBytes),
                 0};
  }
  Result<Answer> answer =
      Call(call, [&](const Frame& event) { return HandleProgress(event, options); });
  return answer.ok() ? MapAnswer(std::move(*answer), options, deadline)
                     : Result<std::unique_ptr<Model>>(std::move(answer).error());
}

Result<void> Client::CheckTrust(const Connection& peer, const OpenOptions& options) const {
  return options.trusted_only ? CheckPeer(peer.fd(), options_.socket_path) : Result<void>();
}

Result<std::unique_ptr<Model>> Client::MapAnswer(Answer answer, const OpenOptions& options,
                                                 TimePoint deadline) {
  Result<OpenReply> reply = Decode<OpenReply>(answer.frame.body);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  NoteOtherName(*reply, options.name);
  ArenaSource source(*answer.connection, *reply, ReceivedDescriptors(answer.frame, *reply),
                     deadline);
  const Result<void> trusted = CheckTrust(*answer.connection, options);
  Result<MappedModel> mapped =
      trusted.ok() ? MapModel(*reply, [&](std::size_t index) { return source.Open(index); })
                   : Result<MappedModel>(trusted.error());
  if (!mapped.ok()) {
    answer.connection->Release(LeaseId{reply->lease});
    return std::move(mapped).error();
  }
  return std::make_unique<Model>(std::move(answer.connection), std::move(*reply),
                                 std::move(*mapped));
}

Result<Client::Answer> Client::Call(const Request& request, const EventHandler& on_event) {
  const int attempts = request.type == MessageType::kShutdown ? 1 : 2;
  for (int attempt = 1;; ++attempt) {
    Result<std::shared_ptr<Connection>> connection = Connected(ConnectDeadline(request.deadline));
    if (!connection.ok()) {
      return std::move(connection).error();
    }
    Result<Frame> frame = (*connection)->Call(request, on_event);
    if (frame.ok()) {
      return Answer{std::move(*frame), std::move(*connection)};
    }
    if (frame.error().code != ErrorCode::kUnavailable || attempt == attempts) {
      return std::move(frame).error();
    }
    (void)Exchange(nullptr);
  }
}

// Swaps outside of the destructor's reach: the old connection must not die under the mutex.
std::shared_ptr<Connection> Client::Exchange(std::shared_ptr<Connection> connection) {
  const std::lock_guard lock(ProcessState::Get().mutex());
  connection_.swap(connection);
  return connection;
}

TimePoint Client::ConnectDeadline(TimePoint deadline) const {
  return std::min(deadline, DeadlineAfter(std::max<Duration>(options_.timeout, kConnectTimeout)));
}

Result<std::shared_ptr<Connection>> Client::Connected(TimePoint deadline) {
  std::shared_ptr<Connection> current;
  {
    const std::lock_guard lock(ProcessState::Get().mutex());
    current = connection_;
  }
  if (current && current->usable()) {
    return current;
  }
  Result<std::shared_ptr<Connection>> fresh = DialOrStart(deadline);
  if (fresh.ok()) {
    (void)Exchange(*fresh);
  }
  return fresh;
}

Result<std::shared_ptr<Connection>> Client::Dial(TimePoint deadline) const {
  Result<UniqueFd> socket = ConnectUnix(options_.socket_path, deadline);
  if (!socket.ok()) {
    return std::move(socket).error();
  }
  if (!path_was_told_) {
    if (auto checked = CheckPeer(socket->get(), options_.socket_path); !checked.ok()) {
      return std::move(checked).error();
    }
  }
  return Connection::Greet(std::move(*socket), deadline);
}

bool Client::MayStart() const {
  const char* told = std::getenv("MODELCACHE_AUTOSTART");
  return options_.autostart == Autostart::kAlways ||
         (options_.autostart == Autostart::kDefault &&
          (told == nullptr || std::string_view(told) != "0"));
}

Result<std::shared_ptr<Connection>> Client::DialOrStart(TimePoint deadline) {
  Starter starter(options_.socket_path, options_.daemon_path, !path_was_told_);
  milliseconds pause = kFirstPause;
  while (true) {
    Result<std::shared_ptr<Connection>> connection = Dial(deadline);
    if (connection.ok() || connection.error().code != ErrorCode::kUnavailable) {
      return connection;
    }
    if (!MayStart()) {
      Error error = std::move(connection).error();
      if (error.errno_value != 0) {
        error.message = std::generic_category().message(error.errno_value);
      }
      error.message = "no daemon answers at " + options_.socket_path + ": " + error.message;
      return error;
    }
    Result<bool> started = starter.Step();
    if (!started.ok()) {
      return std::move(started).error();
    }
    started_ = started_ || *started;
    if (std::chrono::steady_clock::now() >= deadline) {
      return Error{ErrorCode::kUnavailable,
                   "no daemon answers at " + options_.socket_path + " in time" + starter.Log(), 0};
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace modelcache
