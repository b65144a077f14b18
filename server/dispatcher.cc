// Requests of clients to catalog and jobs, and their answers.
#include "server/dispatcher.h"

#include <array>
#include <utility>

#include "common/socket.h"
#include "proto/version.h"
#include "server/metrics.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kLongestTimeoutMs = 10ULL * 365 * 24 * 3600 * 1000;
constexpr std::size_t kMaxTextBytes = 4096;  // of a name or path: PATH_MAX

template <typename Body>
SendToClient Reply(Caller to, MessageType type, Body body) {
  return SendToClient{to.session, type, kFlagReply, to.request_id, std::move(body), {}};
}

SendToClient Refuse(Caller to, MessageType type, const Error& error) {
  Waiter waiter;
  waiter.session = to.session;
  waiter.request_id = to.request_id;
  return RefusedReply(waiter, type, error);
}

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

std::optional<Error> CheckText(const std::string& what, const std::string& text) {
  if (text.size() > kMaxTextBytes || text.find('\0') != std::string::npos) {
    return Invalid(what + " of " + std::to_string(text.size()) +
                   " bytes is too long or contains a zero byte, limit " +
                   std::to_string(kMaxTextBytes));
  }
  return std::nullopt;
}

bool IsKnownFormat(const std::string& format) {
  static constexpr std::array<std::string_view, 5> kFormats{"auto", "safetensors", "torch",
                                                            "torchscript", "npz"};
  for (std::string_view known : kFormats) {
    if (format == known) {
      return true;
    }
  }
  return false;
}

bool IsKnownDevice(const std::string& device) {
  if (device == "cpu" || device == "cuda") {
    return true;
  }
  constexpr std::size_t kPrefix = 5;
  return device.starts_with("cuda:") && device.size() > kPrefix && device.size() <= kPrefix + 3 &&
         device.find_first_not_of("0123456789", kPrefix) == std::string::npos;
}

Waiter MakeWaiter(Caller from, std::uint64_t timeout_ms, TimePoint now) {
  Waiter waiter;
  waiter.session = from.session;
  waiter.request_id = from.request_id;
  if (timeout_ms > 0 && timeout_ms < kLongestTimeoutMs) {
    waiter.deadline = now + std::chrono::milliseconds(timeout_ms);
  }
  return waiter;
}

}  // namespace

// Every call that may drop a model ends here: arenas that lost their last user are closed.
Actions Dispatcher::Finish(Actions actions) {
  jobs_.DropStaleCollapse(actions);
  std::vector<ArenaId> unused = catalog_.arenas().TakeUnused();
  if (!unused.empty()) {
    actions.emplace_back(CloseArenas{std::move(unused)});
  }
  return actions;
}

std::optional<Error> Dispatcher::CheckOpen(const OpenRequest& request,
                                           std::size_t descriptors) const {
  if (stopping_) {
    return Error{ErrorCode::kUnavailable, "the daemon is shutting down", 0};
  }
  const int kinds =
      (request.files.empty() ? 0 : 1) + (request.model.empty() ? 0 : 1) + (request.call ? 1 : 0);
  if (kinds != 1) {
    return Invalid("an open names either files or a model or a call");
  }
  const std::size_t expected = request.call ? 1 : request.files.size();
  if (expected != descriptors) {
    return Invalid(std::to_string(expected) + " files were named, " + std::to_string(descriptors) +
                   " descriptors came along");
  }
  if (request.call) {
    return CheckCall(*request.call);
  }
  if (!IsKnownFormat(request.format)) {
    return Error{ErrorCode::kUnsupported, "unknown format '" + request.format + "'", 0};
  }
  if (!IsKnownDevice(request.device)) {
    return Error{ErrorCode::kUnsupported, "unknown device '" + request.device + "'", 0};
  }
  for (const FileRef& file : request.files) {
    if (auto error = CheckText("the name of a file", file.name); error) {
      return error;
    }
    if (auto error = CheckText("the path of a file", file.path); error) {
      return error;
    }
  }
  return CheckText("the name of the model", request.name);
}

std::optional<Error> Dispatcher::CheckCaller(Caller from) const {
  if (jobs_.IsWaiting(from.session, from.request_id)) {
    return Error{ErrorCode::kProtocol,
                 "request " + std::to_string(from.request_id) +
                     " of this connection waits already; its number cannot be used again yet",
                 0};
  }
  const std::size_t waiting = jobs_.WaitingCount(from.session);
  if (waiting >= limits_.max_waiting_per_session) {
    return Error{ErrorCode::kLimit,
                 std::to_string(waiting) + " requests of this connection wait for loaders, limit " +
                     std::to_string(limits_.max_waiting_per_session),
                 0};
  }
  // Each that waits may become a lease.
  const std::size_t leases = catalog_.LeaseCount(from.session) + waiting;
  if (leases >= limits_.max_leases_per_session) {
    return Error{ErrorCode::kLimit,
                 "this connection has " + std::to_string(leases) + " leases, limit " +
                     std::to_string(limits_.max_leases_per_session),
                 0};
  }
  return std::nullopt;
}

Actions Dispatcher::OnOpen(Caller from, const OpenRequest& request, std::vector<OpenedFile> files,
                           TimePoint now) {
  Actions out;
  catalog_.ForgetRequest(from.session, from.request_id);
  std::optional<Error> error = CheckOpen(request, files.size());
  if (!error && request.call && !from.own_user) {
    error = Error{ErrorCode::kPermission,
                  "Python calls run as the daemon's user: another user may not have them made", 0};
  }
  if (!error) {
    error = CheckCaller(from);
  }
  if (error) {
    out.emplace_back(Refuse(from, MessageType::kOpen, *error));
    return out;
  }
  Waiter waiter = MakeWaiter(from, request.timeout_ms, now);
  waiter.want_descriptors = request.want_descriptors;
  waiter.want_progress = request.want_progress;
  if (request.call) {
    OpenCall(std::move(waiter), request, std::move(files.front().fd), now, out);
    return Finish(std::move(out));
  }
  if (request.files.empty()) {
    OpenByName(waiter, request, now, out);
    return Finish(std::move(out));
  }
  std::vector<FileStat> stats;
  stats.reserve(files.size());
  for (const OpenedFile& file : files) {
    stats.push_back(file.stat);
  }
  const ModelId id = ComputeModelId(request.files, stats, request.format, request.device);
  if (catalog_.Find(id) != nullptr) {
    catalog_.Reinstate(id, now);
    OpenResident(waiter, request, id, now, out);
  } else if (!jobs_.Join(id, waiter, request.pin)) {
    StartLoad(std::move(waiter), request, id, std::move(files), now, out);
  }
  return Finish(std::move(out));
}

void Dispatcher::OpenResident(const Waiter& waiter, const OpenRequest& request, const ModelId& id,
                              TimePoint now, Actions& out) {
  if (request.count_hit || !request.files.empty()) {
    catalog_.CountHit(id, now);
  }
  if (request.pin) {
    catalog_.SetPinned(id, true, now);
  }
  out.emplace_back(OpenedReply(catalog_, id, waiter, now));
}

void Dispatcher::OpenByName(const Waiter& waiter, const OpenRequest& request, TimePoint now,
                            Actions& out) {
  Result<ModelId> id = catalog_.Resolve(request.model);
  if (!id.ok()) {
    const std::string* why = calls_.Uncacheable(request.model);
    out.emplace_back(RefusedReply(waiter, MessageType::kOpen,
                                  why == nullptr ? id.error() : UncacheableError(*why)));
    return;
  }
  OpenResident(waiter, request, *id, now, out);
}

void Dispatcher::StartLoad(Waiter waiter, const OpenRequest& request, const ModelId& id,
                           std::vector<OpenedFile> files, TimePoint now, Actions& out) {
  LoadSpec spec;
  spec.wanted.id = id;
  spec.wanted.path = request.files.front().path;
  spec.wanted.options = {request.format, request.device};
  spec.name = request.name.empty() ? DefaultName(request.files) : request.name;
  spec.wanted.name = spec.name;
  spec.refs = request.files;
  for (std::size_t i = 0; i < files.size(); ++i) {
    spec.wanted.files.push_back({request.files[i].name, request.files[i].path, files[i].stat});
    spec.files.push_back(std::move(files[i].fd));
  }
  spec.pin = request.pin;
  BeginLoad(std::move(waiter), std::move(spec), now, out);
}

void Dispatcher::BeginLoad(Waiter waiter, LoadSpec spec, TimePoint now, Actions& out) {
  if (auto error = jobs_.CheckQueue(spec.files.size()); error) {
    out.emplace_back(RefusedReply(waiter, MessageType::kOpen, *error));
    return;
  }
  waiter.reason = catalog_.RecordMiss(spec.wanted, now).text;
  out.emplace_back(Note{Note::Level::kInfo, "loading " + spec.name + " for session " +
                                                std::to_string(waiter.session.value) + ": " +
                                                waiter.reason});
  jobs_.Load(std::move(spec), std::move(waiter), now, out);
}

Actions Dispatcher::OnCancel(Caller from, TimePoint now) {
  Actions out;
  if (jobs_.IsWaiting(from.session, from.request_id)) {
    jobs_.Withdraw(from.session, from.request_id, now, out);
  } else {
    // The answer may have been on its way already, to a client that reads it late or never.
    (void)catalog_.ReleaseOf(from.session, from.request_id, now);
  }
  return Finish(std::move(out));
}

Actions Dispatcher::OnRelease(SessionId session, const ReleaseRequest& request, TimePoint now) {
  // An unknown lease is no error: a release may cross the end of its lease.
  (void)catalog_.Release(session, LeaseId{request.lease}, now);
  return Finish({});
}

Actions Dispatcher::OnArenaDescriptors(Caller from, const ArenaDescriptorsRequest& request) {
  Actions out;
  const ResidentModel* model = catalog_.Leased(from.session, LeaseId{request.lease});
  if (model == nullptr) {
    out.emplace_back(
        Refuse(from, MessageType::kArenaDescriptors,
               Error{ErrorCode::kNotFound,
                     "this connection has no lease " + std::to_string(request.lease), 0}));
    return out;
  }
  const std::size_t total = model->arenas.size();
  if (request.count > kMaxDescriptors || request.first > total ||
      request.count > total - request.first) {
    out.emplace_back(Refuse(
        from, MessageType::kArenaDescriptors,
        Invalid("arenas " + std::to_string(request.first) + " and " +
                std::to_string(request.count) + " following, the model has " +
                std::to_string(total) + ", limit per request " + std::to_string(kMaxDescriptors))));
    return out;
  }
  SendToClient send = Reply(from, MessageType::kArenaDescriptors, EmptyReply{});
  for (std::size_t i = 0; i < request.count; ++i) {
    send.descriptors.push_back(model->arenas[request.first + i].id);
  }
  out.emplace_back(std::move(send));
  return out;
}

Actions Dispatcher::OnList(Caller from, TimePoint now) {
  ListReply reply;
  for (const auto& [id, model] : catalog_.models()) {
    reply.models.push_back(catalog_.Describe(model, now));
  }
  for (ModelInfo& info : jobs_.Loading(now)) {
    reply.models.push_back(std::move(info));
  }
  Actions out;
  out.emplace_back(Reply(from, MessageType::kList, std::move(reply)));
  return out;
}

StatusReply Dispatcher::Status(TimePoint now) const {
  StatusReply status;
  status.daemon_pid = facts_.pid;
  status.version = kProductVersion;
  status.socket = facts_.socket;
  status.memory_budget_bytes = catalog_.memory_budget_bytes();
  status.arena_bytes = catalog_.storages().payload_bytes();
  status.resident_bytes = catalog_.arenas().resident_bytes() + catalog_.arenas().closing_bytes();
  status.reserved_bytes = catalog_.arenas().reserved_bytes();
  status.entries = catalog_.models().size();
  status.loading = jobs_.loading_count();
  status.loads = jobs_.counters().loads;
  status.failed_loads = jobs_.counters().failed_loads;
  status.hits = catalog_.counters().hits;
  status.misses = catalog_.counters().AllMisses();
  status.evictions = catalog_.counters().evictions;
  status.leases = catalog_.lease_count();
  status.clients = clients_;
  status.uptime_seconds = Seconds(now - facts_.started);
  return status;
}

Actions Dispatcher::OnStatus(Caller from, TimePoint now) {
  Actions out;
  out.emplace_back(Reply(from, MessageType::kStatus, Status(now)));
  return out;
}

Actions Dispatcher::OnWhy(Caller from, const ModelRequest& request, TimePoint now) {
  WhyReply reply;
  reply.model = request.model;
  reply.state = jobs_.IsLoading(request.model) ? "loading" : "absent";
  std::string path = request.model;
  if (Result<ModelId> id = catalog_.Resolve(request.model); id.ok()) {
    path = catalog_.Find(*id)->path;
    reply.state = "resident";
  } else if (auto absent = ModelId::FromHex(request.model); absent) {
    path = catalog_.history().PathOf(*absent);
  } else if (std::string named = catalog_.history().PathOfName(request.model); !named.empty()) {
    path = std::move(named);
  }
  reply.history = catalog_.history().Of(path, now);
  Actions out;
  if (reply.history.empty() && reply.state == "absent") {
    out.emplace_back(
        Refuse(from, MessageType::kWhy,
               Error{ErrorCode::kNotFound, "nobody has asked for '" + request.model + "' yet", 0}));
  } else {
    out.emplace_back(Reply(from, MessageType::kWhy, std::move(reply)));
  }
  return out;
}

Actions Dispatcher::OnEvict(Caller from, const ModelRequest& request, TimePoint now) {
  Actions out;
  Result<ModelId> id = catalog_.Resolve(request.model);
  Result<void> done = id.ok() ? catalog_.Evict(*id, "on request", now) : Result<void>(id.error());
  if (calls_.Forget(request.model) && !id.ok()) {
    done = {};
  }
  if (done.ok()) {
    out.emplace_back(Reply(from, MessageType::kEvict, EmptyReply{}));
  } else {
    out.emplace_back(Refuse(from, MessageType::kEvict, done.error()));
  }
  return Finish(std::move(out));
}

Actions Dispatcher::OnPin(Caller from, const PinRequest& request, TimePoint now) {
  Actions out;
  Result<ModelId> id = catalog_.Resolve(request.model);
  if (id.ok()) {
    catalog_.SetPinned(*id, request.pinned, now);
  } else if (request.pinned || !catalog_.DropCarriedPin(request.model, now)) {
    out.emplace_back(Refuse(from, MessageType::kPin, id.error()));
    return out;
  }
  out.emplace_back(Reply(from, MessageType::kPin, EmptyReply{}));
  return Finish(std::move(out));
}

Actions Dispatcher::OnVerify(Caller from, const ModelRequest& request, TimePoint now) {
  Actions out;
  catalog_.ForgetRequest(from.session, from.request_id);
  Result<ModelId> id = catalog_.Resolve(request.model);
  std::optional<Error> error = CheckCaller(from);
  if (!id.ok()) {
    error = id.error();
  } else if (stopping_) {
    error = Error{ErrorCode::kUnavailable, "the daemon is shutting down", 0};
  }
  if (error) {
    out.emplace_back(Refuse(from, MessageType::kVerify, *error));
    return out;
  }
  jobs_.Verify(*catalog_.Find(*id), MakeWaiter(from, request.timeout_ms, now), now, out);
  return Finish(std::move(out));
}

std::string Dispatcher::MetricsText(TimePoint now) const {
  return FormatMetrics(Status(now), catalog_.counters(), jobs_.counters(),
                       catalog_.arenas().closing_bytes());
}

Actions Dispatcher::OnMetrics(Caller from, TimePoint now) {
  Actions out;
  out.emplace_back(Reply(from, MessageType::kMetrics, MetricsReply{MetricsText(now)}));
  return out;
}

Actions Dispatcher::OnShutdown(Caller from, TimePoint now) {
  Actions out;
  out.emplace_back(Reply(from, MessageType::kShutdown, EmptyReply{}));
  for (Action& action : OnStop(now)) {
    out.push_back(std::move(action));
  }
  out.emplace_back(StopDaemon{});
  return out;
}

Actions Dispatcher::OnStop(TimePoint now) {
  stopping_ = true;
  Actions out;
  jobs_.Shutdown(now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnDisconnected(SessionId session, TimePoint now) {
  --clients_;
  Actions out;
  catalog_.EndSession(session, now);
  jobs_.EndSession(session, now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnCandidates(JobId job, std::uint32_t request_id,
                                 const CandidatesRequest& request) {
  Actions out;
  jobs_.OnCandidates(job, request_id, request, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnReserve(JobId job, std::uint32_t request_id, ReserveRequest request,
                              TimePoint now) {
  Actions out;
  jobs_.OnReserve(job, request_id, std::move(request), now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnCommit(JobId job, std::uint32_t request_id, const CommitRequest& request) {
  Actions out;
  jobs_.OnCommit(job, request_id, request, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnLoaderProgress(JobId job, const LoaderProgressEvent& event) {
  Actions out;
  jobs_.OnProgress(job, event, out);
  return out;
}

Actions Dispatcher::OnVerified(JobId job, const VerifiedEvent& event, TimePoint now) {
  Actions out;
  jobs_.OnVerified(job, event, now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnLoaderFailed(JobId job, const Error& error, TimePoint now) {
  Actions out;
  const std::string* call = jobs_.CallOf(job);
  if (call != nullptr && error.code == ErrorCode::kUnsupported) {
    calls_.Remember(*call, error.message);
  }
  jobs_.OnFailed(job, error, now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnLoaderExit(JobId job, const std::optional<Error>& error, TimePoint now) {
  Actions out;
  jobs_.OnExit(job, error, now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnArenasCreated(JobId job, Result<std::vector<ArenaEntry>> created,
                                    TimePoint now) {
  Actions out;
  jobs_.OnArenasCreated(job, std::move(created), now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnSealed(JobId job, Result<SealedModel> sealed, TimePoint now) {
  Actions out;
  jobs_.OnSealed(job, std::move(sealed), now, out);
  return Finish(std::move(out));
}

Actions Dispatcher::OnArenaClosed(const ArenaId& arena, TimePoint now) {
  Actions out;
  catalog_.arenas().Closed(arena);
  jobs_.OnRoom(now, out);
  return Finish(std::move(out));
}

void Dispatcher::OnArenaMeasured(const ArenaId& arena, std::uint64_t allocated_bytes) {
  catalog_.arenas().SetCost(arena, allocated_bytes, true);
}

Actions Dispatcher::OnTick(TimePoint now) {
  Actions out;
  jobs_.OnTick(now, out);
  return Finish(std::move(out));
}

}  // namespace modelcache
