// What loaders ask and what the arena store answers.
#include <algorithm>
#include <utility>

#include "common/checked_math.h"
#include "common/socket.h"
#include "proto/arena_layout.h"
#include "server/jobs.h"

namespace modelcache {
namespace {

constexpr std::size_t kCandidatesPerStorage = 4;

Error LoaderProtocol(const std::string& what) {
  return Error{ErrorCode::kLoaderFailed, "the loader broke the protocol: " + what, 0};
}

}  // namespace

void Jobs::OnCandidates(JobId id, std::uint32_t request_id, const CandidatesRequest& request,
                        Actions& out) {
  Job* job = FindIn(id, Phase::kRunning);
  if (job == nullptr) {
    return;
  }
  SendToLoader send{id, MessageType::kCandidates, kFlagReply, request_id, {}, {}};
  CandidatesReply& reply = send.body.emplace<CandidatesReply>();
  std::unordered_map<ArenaId, std::uint32_t> numbers;
  for (const StorageSample& storage : request.storages) {
    for (const StoragePlace& place : catalog_.storages().Candidates(
             storage.size_bytes, storage.sample, kCandidatesPerStorage)) {
      const ArenaEntry* arena = catalog_.arenas().Find(place.arena);
      if (arena == nullptr || place.size_bytes < arena->size_bytes / kBorrowFraction) {
        continue;
      }
      auto known = numbers.find(arena->id);
      if (known == numbers.end()) {
        if (reply.arenas.size() == kMaxDescriptors) {
          continue;
        }
        known = numbers.emplace(arena->id, reply.arenas.size()).first;
        reply.arenas.push_back({arena->id, arena->size_bytes});
        send.descriptors.push_back(arena->id);
        Hold(*job, arena->id);
      }
      reply.candidates.push_back({storage.storage, known->second, place.offset_bytes});
    }
  }
  out.emplace_back(std::move(send));
}

Result<std::uint64_t> Jobs::CheckReserve(const Job& job, const ReserveRequest& request) const {
  if (job.request.kind != JobKind::kLoad || job.reserve_id) {
    return LoaderProtocol("it reserves twice, or for something that is no load");
  }
  if (request.arenas.empty()) {
    return LoaderProtocol("it reserves no arena");
  }
  if (request.arenas.size() > kMaxDescriptors) {
    return Error{ErrorCode::kLimit,
                 "the model needs " + std::to_string(request.arenas.size()) + " arenas, limit " +
                     std::to_string(kMaxDescriptors) +
                     "; start the daemon with a larger --arena-max",
                 0};
  }
  std::uint64_t sum = 0;
  for (const ReserveArena& arena : request.arenas) {
    auto next = CheckedAdd(sum, arena.charge_bytes);
    if (!next || arena.charge_bytes > arena.size_bytes) {
      return LoaderProtocol("an arena of " + std::to_string(arena.size_bytes) +
                            " bytes is charged " + std::to_string(arena.charge_bytes));
    }
    sum = *next;
  }
  for (const ArenaId& arena : request.borrowed) {
    if (!job.held.contains(arena)) {
      return LoaderProtocol("it borrows arena " + arena.Hex() + ", which it was not offered");
    }
  }
  return sum;
}

std::uint64_t Jobs::PromisedBytes() const {
  std::uint64_t sum = creating_bytes_;
  for (JobId id : reserving_) {
    sum += jobs_.at(id).charge_bytes;
  }
  return sum;
}

void Jobs::OnReserve(JobId id, std::uint32_t request_id, ReserveRequest request, TimePoint now,
                     Actions& out) {
  Job* job = FindIn(id, Phase::kRunning);
  if (job == nullptr) {
    return;
  }
  Result<std::uint64_t> charge = CheckReserve(*job, request);
  if (!charge.ok()) {
    FailLoad(*job, charge.error(), now, out);
    return;
  }
  for (const ArenaId& arena : std::set<ArenaId>(job->held)) {
    if (std::find(request.borrowed.begin(), request.borrowed.end(), arena) ==
        request.borrowed.end()) {
      Unhold(*job, arena);
    }
  }
  if (auto room = catalog_.MakeRoom(*charge, PromisedBytes(), now); !room.ok()) {
    Error error = room.error();
    error.message = job->name + ": " + error.message;
    FailLoad(*job, error, now, out);
    return;
  }
  job->reserve_id = request_id;
  job->charge_bytes = *charge;
  job->borrowed = request.borrowed;
  job->reserve = std::move(request);
  reserving_.push_back(id);
  OnRoom(now, out);
}

void Jobs::OnRoom(TimePoint now, Actions& out) {
  while (!reserving_.empty()) {
    Job& job = jobs_.at(reserving_.front());
    if (!catalog_.Fits(creating_bytes_ + job.charge_bytes)) {
      if (catalog_.arenas().closing_bytes() > 0) {
        return;  // asked again when that memory is back
      }
      // Other arenas grew meanwhile (huge pages round up): make room once more.
      auto room = catalog_.MakeRoom(job.charge_bytes, creating_bytes_, now);
      if (!room.ok()) {
        FailLoad(job, room.error(), now, out);
        continue;
      }
      if (catalog_.arenas().closing_bytes() > 0) {
        return;
      }
    }
    reserving_.pop_front();
    creating_bytes_ += job.charge_bytes;
    out.emplace_back(CreateArenas{job.id, job.reserve.arenas});
  }
}

void Jobs::OnArenasCreated(JobId id, Result<std::vector<ArenaEntry>> created, TimePoint now,
                           Actions& out) {
  Job* job = Find(id);
  if (job == nullptr) {
    return;
  }
  creating_bytes_ -= job->charge_bytes;
  if (!created.ok()) {
    if (job->phase == Phase::kRunning) {
      FailLoad(*job, created.error(), now, out);
    }
    return;
  }
  SendToLoader send{id, MessageType::kReserve, kFlagReply, *job->reserve_id, {}, {}};
  ReserveReply& reply = send.body.emplace<ReserveReply>();
  for (const ArenaEntry& entry : *created) {
    catalog_.arenas().Add(entry);
    job->held.insert(entry.id);
    job->own.push_back(entry.id);
    reply.arenas.push_back(entry.id);
    if (job->lingers) {
      catalog_.arenas().Linger(entry.id);
    }
  }
  send.descriptors = job->own;
  out.emplace_back(std::move(send));
}

void Jobs::OnCommit(JobId id, std::uint32_t request_id, const CommitRequest& request,
                    Actions& out) {
  Job* job = FindIn(id, Phase::kRunning);
  if (job == nullptr || job->own.empty()) {
    return;
  }
  job->phase = Phase::kSealing;
  job->commit_id = request_id;
  job->bytes_read = request.bytes_read;
  out.emplace_back(SealArenas{id, job->request.model_id, job->borrowed, job->own});
}

ResidentModel Jobs::MakeModel(Job& job, SealedModel sealed, TimePoint now) const {
  ResidentModel model;
  model.id = job.request.model_id;
  model.name = job.name;
  model.path = job.spec.wanted.path;
  model.format = std::move(sealed.format);
  model.options = job.spec.wanted.options;
  model.files = std::move(job.spec.refs);
  model.identities = std::move(job.spec.wanted.files);
  model.borrowed_arenas = job.borrowed.size();
  std::vector<ArenaId> ids = job.borrowed;
  ids.insert(ids.end(), job.own.begin(), job.own.end());
  for (const ArenaId& id : ids) {
    const ArenaEntry* entry = catalog_.arenas().Find(id);
    model.arenas.push_back({id, entry->fd, entry->inode, entry->size_bytes});
  }
  model.places = std::move(sealed.places);
  model.tensors = sealed.tensors;
  model.storages = sealed.storages;
  model.pinned = job.spec.pin;
  model.load_seconds = Seconds(now - job.started);
  return model;
}

void Jobs::OnSealed(JobId id, Result<SealedModel> sealed, TimePoint now, Actions& out) {
  Job* job = FindIn(id, Phase::kSealing);
  if (job == nullptr) {
    return;
  }
  if (!sealed.ok()) {
    FailLoad(*job, sealed.error(), now, out);
    return;
  }
  std::uint64_t held_bytes = 0;
  for (const auto& [arena, allocated] : sealed->allocated_bytes) {
    catalog_.arenas().SetCost(arena, allocated, true);
    held_bytes += allocated;
  }
  // Pages beyond what was promised (huge pages round up) need room of their own.
  if (auto room = catalog_.MakeRoom(0, PromisedBytes(), now);
      held_bytes > job->charge_bytes && !room.ok()) {
    Error error = room.error();
    error.message = job->name + ": the loader filled " + std::to_string(held_bytes) +
                    " bytes, reserved " + std::to_string(job->charge_bytes) + "; " + error.message;
    FailLoad(*job, error, now, out);
    return;
  }
  ResidentModel model = MakeModel(*job, std::move(*sealed), now);
  ++counters_.loads;
  counters_.load_seconds += model.load_seconds;
  const std::string story = std::to_string(held_bytes) + " bytes in " +
                            std::to_string(model.load_seconds) + " s, " +
                            std::to_string(job->bytes_read) + " bytes read";
  catalog_.history().Add(model.path, "load", story, now);
  out.emplace_back(Note{Note::Level::kInfo, "loaded " + model.name + ": " + story});
  catalog_.Insert(std::move(model), now);
  Publish(*job, now, out);
  out.emplace_back(
      SendToLoader{id, MessageType::kCommit, kFlagReply, job->commit_id, EmptyReply{}, {}});
  if (held_bytes >= limits_.collapse_from_bytes) {
    to_collapse_.push_back(job->request.model_id);
  }
}

void Jobs::OnProgress(JobId id, const LoaderProgressEvent& event, Actions& out) {
  const Job* job = FindIn(id, Phase::kRunning);
  if (job == nullptr) {
    return;
  }
  for (const Waiter& waiter : job->waiters) {
    if (waiter.want_progress) {
      out.emplace_back(SendToClient{waiter.session,
                                    MessageType::kProgress,
                                    kFlagEvent,
                                    waiter.request_id,
                                    ProgressEvent{event.done_bytes, event.total_bytes},
                                    {}});
    }
  }
}

void Jobs::OnVerified(JobId id, const VerifiedEvent& event, TimePoint now, Actions& out) {
  Job* job = FindIn(id, Phase::kRunning);
  if (job == nullptr || job->request.kind != JobKind::kVerify) {
    return;
  }
  for (const Waiter& waiter : job->waiters) {
    CountOut(*job, waiter);
    out.emplace_back(SendToClient{
        waiter.session, MessageType::kVerify, kFlagReply, waiter.request_id, event, {}});
  }
  job->waiters.clear();
  AwaitExit(*job, now);
}

void Jobs::OnFailed(JobId id, const Error& error, TimePoint now, Actions& out) {
  Job* job = Find(id);
  if (job == nullptr || job->phase == Phase::kFinished || job->phase == Phase::kDying) {
    return;
  }
  if (job->request.kind == JobKind::kCollapse) {
    Abandon(*job, out);  // huge pages are a help, not a need
    return;
  }
  FailLoad(*job, error, now, out);
}

}  // namespace modelcache
