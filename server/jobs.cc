// Starting, waiting for, cancelling and ending jobs. What loaders ask is in jobs_loader.cc.
#include "server/jobs.h"

#include <algorithm>
#include <utility>

#include "common/socket.h"

namespace modelcache {
namespace {

constexpr Duration kExitTimeout = std::chrono::seconds(10);  // after the last word of a loader

// What the log says about a failure. Messages of a loader quote the model's files, whose content is
// for those who opened them: the client gets them, and `why` tells them.
std::string LogText(const Error& error) {
  switch (error.code) {
    case ErrorCode::kLoaderFailed:
      if (error.message.starts_with("loader ")) {  // how it ended; what it printed stands behind
        return error.message.substr(0, error.message.find(';'));
      }
      [[fallthrough]];
    case ErrorCode::kBadFile:
    case ErrorCode::kUnsupported:
    case ErrorCode::kInternal:
      return std::string(ErrorCodeName(error.code)) + " (the message went to the client)";
    default:
      return error.message;
  }
}

}  // namespace

SendToClient OpenedReply(Catalog& catalog, const ModelId& id, const Waiter& waiter, TimePoint now) {
  const LeaseId lease = catalog.Lease(id, waiter.session, now, waiter.request_id);
  const ResidentModel& model = *catalog.Find(id);
  SendToClient send{waiter.session, MessageType::kOpen, kFlagReply, waiter.request_id, {}, {}};
  OpenReply& reply = send.body.emplace<OpenReply>();
  reply.model_id = id;
  reply.name = model.name;
  reply.lease = lease.value;
  reply.hit = waiter.reason.empty();
  reply.reason = reply.hit ? "resident" : waiter.reason;
  reply.load_seconds = model.load_seconds;
  reply.arenas = model.arenas;
  if (waiter.want_descriptors) {
    const std::size_t count = std::min(model.arenas.size(), kMaxDescriptors);
    for (std::size_t i = 0; i < count; ++i) {
      send.descriptors.push_back(model.arenas[i].id);
    }
  }
  return send;
}

SendToClient RefusedReply(const Waiter& waiter, MessageType type, const Error& error) {
  return SendToClient{waiter.session,    type,           kFlagReply | kFlagError,
                      waiter.request_id, ToReply(error), {}};
}

Jobs::Job* Jobs::Find(JobId id) {
  auto found = jobs_.find(id);
  return found == jobs_.end() ? nullptr : &found->second;
}

Jobs::Job* Jobs::FindIn(JobId id, Phase phase) {
  Job* job = Find(id);
  return job != nullptr && job->phase == phase ? job : nullptr;
}

JobId Jobs::NewJob(JobKind kind) {
  const JobId id{++last_job_};
  Job& job = jobs_[id];
  job.id = id;
  job.request.kind = kind;
  job.request.arena_max_bytes = limits_.arena_max_bytes;
  return id;
}

void Jobs::AddWaiter(Job& job, Waiter waiter) {
  if (waiter.deadline != kNoDeadline) {
    deadlines_.insert({waiter.deadline, job.id, waiter.session, waiter.request_id});
  }
  waiting_[waiter.session].insert(waiter.request_id);
  job.waiters.push_back(std::move(waiter));
}

void Jobs::CountOut(const Job& job, const Waiter& waiter) {
  auto found = waiting_.find(waiter.session);
  found->second.erase(waiter.request_id);
  if (found->second.empty()) {
    waiting_.erase(found);
  }
  deadlines_.erase({waiter.deadline, job.id, waiter.session, waiter.request_id});
}

void Jobs::SetDeadline(Job& job, TimePoint at) {
  deadlines_.erase({job.deadline, job.id, SessionId{}, 0});
  job.deadline = at;
  if (at != kNoDeadline) {
    deadlines_.insert({at, job.id, SessionId{}, 0});
  }
}

void Jobs::Hold(Job& job, const ArenaId& arena) {
  if (!job.held.insert(arena).second) {
    return;
  }
  if (job.lingers) {
    catalog_.arenas().UseLingering(arena);
  } else {
    catalog_.arenas().Use(arena);
  }
}

void Jobs::Unhold(Job& job, const ArenaId& arena) {
  if (job.held.erase(arena) == 0) {
    return;
  }
  if (job.lingers) {
    catalog_.arenas().UnuseLingering(arena);
  } else {
    catalog_.arenas().Unuse(arena);
  }
}

// The job's process is being killed: what it holds is needed by it no more.
void Jobs::Linger(Job& job) {
  if (job.lingers) {
    return;
  }
  job.lingers = true;
  for (const ArenaId& arena : job.held) {
    catalog_.arenas().Linger(arena);
  }
}

void Jobs::HoldAll(Job& job, const ResidentModel& model, std::size_t first) {
  for (std::size_t i = first; i < model.arenas.size(); ++i) {
    job.request.arenas.push_back({model.arenas[i].id, model.arenas[i].size_bytes});
    Hold(job, model.arenas[i].id);
  }
}

bool Jobs::Join(const ModelId& id, Waiter waiter, bool pin) {
  auto found = loading_.find(id);
  if (found == loading_.end()) {
    return false;
  }
  Job& job = jobs_.at(found->second);
  waiter.reason = "joined a load in progress (" + job.waiters.front().reason + ")";
  job.spec.pin = job.spec.pin || pin;
  AddWaiter(job, std::move(waiter));
  catalog_.CountJoin();
  return true;
}

std::optional<ModelId> Jobs::LoadingCall(std::string_view path) const {
  for (const auto& [model, id] : loading_) {
    if (jobs_.at(id).spec.wanted.path == path) {
      return model;
    }
  }
  return std::nullopt;
}

const std::string* Jobs::CallOf(JobId id) const {
  auto found = jobs_.find(id);
  const bool loads = found != jobs_.end() && (found->second.phase == Phase::kRunning ||
                                              found->second.phase == Phase::kSealing);
  if (!loads || found->second.request.format != kCallFormat ||
      found->second.request.kind != JobKind::kLoad) {
    return nullptr;
  }
  return &found->second.spec.wanted.path;
}

std::optional<Error> Jobs::CheckQueue(std::size_t descriptors) const {
  const std::size_t held = queued_descriptors_ + descriptors;
  if (running_ < limits_.max_running || held <= limits_.max_queued_descriptors) {
    return std::nullopt;
  }
  return Error{ErrorCode::kLimit,
               "queued loads would hold " + std::to_string(held) +
                   " descriptors, limit of all together " +
                   std::to_string(limits_.max_queued_descriptors) + " (a quarter of RLIMIT_NOFILE)",
               0};
}

std::size_t Jobs::WaitingCount(SessionId session) const {
  auto found = waiting_.find(session);
  return found == waiting_.end() ? 0 : found->second.size();
}

bool Jobs::IsWaiting(SessionId session, std::uint32_t request_id) const {
  auto found = waiting_.find(session);
  return found != waiting_.end() && found->second.contains(request_id);
}

void Jobs::Load(LoadSpec spec, Waiter waiter, TimePoint now, Actions& out) {
  Job& job = jobs_.at(NewJob(JobKind::kLoad));
  job.name = spec.name;
  job.request.files = spec.refs;
  if (spec.launch) {
    job.request.files.push_back({"call", spec.wanted.path});  // the descriptor holds it
  }
  job.request.model_id = spec.wanted.id;
  job.request.format = spec.wanted.options.format;
  job.request.device = spec.wanted.options.device;
  job.spec = std::move(spec);
  AddWaiter(job, std::move(waiter));
  loading_[job.request.model_id] = job.id;
  queued_descriptors_ += job.spec.files.size();
  queue_.push_back(job.id);
  Pump(now, out);
}

void Jobs::Verify(const ResidentModel& model, Waiter waiter, TimePoint now, Actions& out) {
  if (model.arenas.size() > kMaxDescriptors) {
    out.emplace_back(RefusedReply(
        waiter, MessageType::kVerify,
        Error{ErrorCode::kLimit,
              std::to_string(model.arenas.size()) + " arenas cannot be verified at once, limit " +
                  std::to_string(kMaxDescriptors),
              0}));
    return;
  }
  Job& job = jobs_.at(NewJob(JobKind::kVerify));
  job.name = model.name;
  job.request.files = model.files;  // paths only: the daemon keeps no descriptors of model files
  job.request.model_id = model.id;
  job.request.format = model.format;
  job.request.device = model.options.device;
  HoldAll(job, model, 0);
  AddWaiter(job, std::move(waiter));
  queue_.push_back(job.id);
  Pump(now, out);
}

void Jobs::Pump(TimePoint now, Actions& out) {
  while (running_ < limits_.max_running && !queue_.empty()) {
    Job& job = jobs_.at(queue_.front());
    queue_.pop_front();
    PauseCollapse(out);
    ++running_;
    Start(job, now, out);
  }
  if (running_ == 0 && collapse_.value == 0 && !to_collapse_.empty()) {
    StartCollapse(now, out);
  }
}

void Jobs::Start(Job& job, TimePoint now, Actions& out) {
  queued_descriptors_ -= job.spec.files.size();
  job.phase = Phase::kRunning;
  job.started = now;
  const bool bounded = limits_.load_timeout < kNoDeadline - now;
  SetDeadline(job, bounded ? now + limits_.load_timeout : kNoDeadline);
  out.emplace_back(
      StartJob{job.id, job.request, std::move(job.spec.files), std::move(job.spec.launch)});
}

void Jobs::StartCollapse(TimePoint now, Actions& out) {
  while (!to_collapse_.empty()) {
    const ResidentModel* model = catalog_.Find(to_collapse_.front());
    to_collapse_.pop_front();
    if (model == nullptr || model->arenas.size() - model->borrowed_arenas > kMaxDescriptors) {
      continue;
    }
    Job& job = jobs_.at(NewJob(JobKind::kCollapse));
    job.name = model->name;
    job.request.model_id = model->id;
    job.lingers = true;
    HoldAll(job, *model, model->borrowed_arenas);
    collapse_ = job.id;
    Start(job, now, out);
    return;
  }
}

// A load that somebody waits for goes first; what is done so far stays done.
void Jobs::PauseCollapse(Actions& out) {
  Job* job = FindIn(collapse_, Phase::kRunning);
  if (job != nullptr) {
    to_collapse_.push_front(job->request.model_id);
    Abandon(*job, out);
  }
}

void Jobs::DropStaleCollapse(Actions& out) {
  Job* job = FindIn(collapse_, Phase::kRunning);
  if (job != nullptr && catalog_.Find(job->request.model_id) == nullptr) {
    Abandon(*job, out);
  }
}

void Jobs::RefuseWaiters(Job& job, const Error& error, Actions& out) {
  const MessageType type =
      job.request.kind == JobKind::kVerify ? MessageType::kVerify : MessageType::kOpen;
  for (const Waiter& waiter : job.waiters) {
    CountOut(job, waiter);
    out.emplace_back(RefusedReply(waiter, type, error));
  }
  job.waiters.clear();
}

// Ends the job's work: at once when it has no process yet, else by killing that.
void Jobs::Abandon(Job& job, Actions& out) {
  if (auto found = loading_.find(job.request.model_id);
      found != loading_.end() && found->second == job.id) {
    loading_.erase(found);
  }
  std::erase(reserving_, job.id);
  if (job.phase == Phase::kQueued) {
    std::erase(queue_, job.id);
    queued_descriptors_ -= job.spec.files.size();
    Forget(job);
    return;
  }
  SetDeadline(job, kNoDeadline);
  job.phase = Phase::kDying;
  Linger(job);
  out.emplace_back(CancelJob{job.id});
}

void Jobs::CancelIfUnwanted(Job& job, TimePoint now, Actions& out) {
  const bool wanted = !job.waiters.empty() || job.request.kind == JobKind::kCollapse ||
                      job.phase == Phase::kFinished || job.phase == Phase::kDying;
  if (wanted) {
    return;
  }
  if (job.request.kind == JobKind::kLoad) {
    ++counters_.cancelled_loads;
    catalog_.history().Failed(job.spec.wanted.path, job.spec.wanted.options,
                              "cancelled: nobody waited any more", now);
    out.emplace_back(Note{Note::Level::kInfo, "load of " + job.name + " cancelled: nobody waits"});
  }
  Abandon(job, out);
}

void Jobs::FailLoad(Job& job, const Error& error, TimePoint now, Actions& out) {
  if (job.request.kind == JobKind::kLoad) {
    ++counters_.failed_loads;
    catalog_.history().Failed(job.spec.wanted.path, job.spec.wanted.options, error.message, now);
  }
  out.emplace_back(Note{Note::Level::kWarning, "job for " + job.name + ": " + LogText(error)});
  RefuseWaiters(job, error, out);
  Abandon(job, out);
}

// The job's process is gone, or never was.
void Jobs::Forget(Job& job) {
  for (const ArenaId& arena : std::set<ArenaId>(job.held)) {
    Unhold(job, arena);
  }
  SetDeadline(job, kNoDeadline);
  for (const Waiter& waiter : job.waiters) {
    CountOut(job, waiter);
  }
  const JobId id = job.id;  // the job goes with it
  jobs_.erase(id);
}

template <typename Predicate>
void Jobs::RemoveWaiters(Predicate leaves, TimePoint now, Actions& out) {
  std::vector<JobId> touched;
  for (auto& [id, job] : jobs_) {
    const auto stays_end =
        std::stable_partition(job.waiters.begin(), job.waiters.end(),
                              [&](const Waiter& waiter) { return !leaves(waiter); });
    if (stays_end == job.waiters.end()) {
      continue;
    }
    for (auto waiter = stays_end; waiter != job.waiters.end(); ++waiter) {
      CountOut(job, *waiter);
    }
    job.waiters.erase(stays_end, job.waiters.end());
    touched.push_back(id);
  }
  for (JobId id : touched) {
    CancelIfUnwanted(jobs_.at(id), now, out);
  }
}

void Jobs::EndSession(SessionId session, TimePoint now, Actions& out) {
  RemoveWaiters([&](const Waiter& waiter) { return waiter.session == session; }, now, out);
}

void Jobs::Withdraw(SessionId session, std::uint32_t request_id, TimePoint now, Actions& out) {
  const auto leaves = [&](const Waiter& waiter) {
    return waiter.session == session && waiter.request_id == request_id;
  };
  RemoveWaiters(leaves, now, out);
}

void Jobs::Shutdown(TimePoint now, Actions& out) {
  to_collapse_.clear();
  std::vector<JobId> ids;
  for (const auto& [id, job] : jobs_) {
    ids.push_back(id);
  }
  for (JobId id : ids) {
    Job& job = jobs_.at(id);
    RefuseWaiters(job, Error{ErrorCode::kUnavailable, "the daemon is shutting down", 0}, out);
    if (job.request.kind == JobKind::kCollapse && job.phase == Phase::kRunning) {
      Abandon(job, out);
    }
    if (Job* left = Find(id); left != nullptr) {
      CancelIfUnwanted(*left, now, out);
    }
  }
}

TimePoint Jobs::NextDeadline() const {
  return deadlines_.empty() ? kNoDeadline : deadlines_.begin()->at;
}

void Jobs::OnTick(TimePoint now, Actions& out) {
  while (!deadlines_.empty() && deadlines_.begin()->at <= now) {
    const Deadline due = *deadlines_.begin();
    deadlines_.erase(deadlines_.begin());
    Job& job = jobs_.at(due.job);
    if (due.session.value == 0) {
      job.deadline = kNoDeadline;
      if (job.phase == Phase::kFinished || job.request.kind == JobKind::kCollapse) {
        Abandon(job, out);
      } else {
        FailLoad(
            job,
            Error{ErrorCode::kTimeout,
                  "the loader of " + job.name + " did not finish within " +
                      std::to_string(static_cast<std::int64_t>(Seconds(now - job.started))) + " s",
                  0},
            now, out);
      }
      continue;
    }
    auto late = std::find_if(job.waiters.begin(), job.waiters.end(), [&](const Waiter& waiter) {
      return waiter.session == due.session && waiter.request_id == due.request_id;
    });
    if (late != job.waiters.end()) {
      const bool verifies = job.request.kind == JobKind::kVerify;
      out.emplace_back(RefusedReply(*late, verifies ? MessageType::kVerify : MessageType::kOpen,
                                    Error{ErrorCode::kTimeout,
                                          (verifies ? "the verification of " : "the load of ") +
                                              job.name + " did not finish in time",
                                          0}));
      CountOut(job, *late);
      job.waiters.erase(late);
      CancelIfUnwanted(job, now, out);
    }
  }
}

void Jobs::OnExit(JobId id, const std::optional<Error>& error, TimePoint now, Actions& out) {
  Job* job = Find(id);
  if (job == nullptr) {
    return;
  }
  const JobKind kind = job->request.kind;
  if (job->phase == Phase::kRunning || job->phase == Phase::kSealing) {
    if (kind != JobKind::kCollapse) {
      Error why =
          error.value_or(Error{ErrorCode::kLoaderFailed, "the loader ended without a result", 0});
      why.message = job->name + ": " + why.message;
      FailLoad(*job, why, now, out);
    }
  }
  if (kind == JobKind::kCollapse) {
    MeasureArenas measure;
    measure.arenas.assign(job->held.begin(), job->held.end());
    out.emplace_back(std::move(measure));
    collapse_ = JobId{};
  } else {
    --running_;
  }
  Forget(*job);
  OnRoom(now, out);  // it may have stood before others in the line
  Pump(now, out);
}

// Its last word is said: it may hold its place only for a moment longer.
void Jobs::AwaitExit(Job& job, TimePoint now) {
  job.phase = Phase::kFinished;
  SetDeadline(job, now + kExitTimeout);
}

void Jobs::Publish(Job& job, TimePoint now, Actions& out) {
  loading_.erase(job.request.model_id);
  for (const Waiter& waiter : job.waiters) {
    CountOut(job, waiter);
    out.emplace_back(OpenedReply(catalog_, job.request.model_id, waiter, now));
  }
  job.waiters.clear();
  AwaitExit(job, now);
}

std::vector<ModelInfo> Jobs::Loading(TimePoint now) const {
  std::vector<ModelInfo> models;
  for (const auto& [model, id] : loading_) {
    const Job& job = jobs_.at(id);
    ModelInfo info;
    info.id = model;
    info.name = job.name;
    info.path = job.spec.wanted.path;
    info.format = job.request.format;
    info.state = "loading";
    info.pinned = job.spec.pin || catalog_.CarriesPin(job.spec.wanted.path);
    info.load_seconds = job.phase == Phase::kQueued ? 0 : Seconds(now - job.started);
    models.push_back(std::move(info));
  }
  return models;
}

bool Jobs::IsLoading(std::string_view path_or_name) const {
  return std::any_of(loading_.begin(), loading_.end(), [&](const auto& entry) {
    const Job& job = jobs_.at(entry.second);
    return job.name == path_or_name || job.spec.wanted.path == path_or_name ||
           entry.first.Hex() == path_or_name;
  });
}

}  // namespace modelcache
