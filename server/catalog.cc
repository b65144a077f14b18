// Models, leases, supersession and eviction.
#include "server/catalog.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace modelcache {
namespace {

constexpr std::size_t kMinPrefixDigits = 6;

std::uint64_t SaturatingSub(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; }

std::string UseText(const ResidentModel& model) {
  std::string text;
  if (model.leases > 0) {
    text = std::to_string(model.leases) + (model.leases == 1 ? " lease" : " leases");
  }
  if (model.pinned) {
    text += text.empty() ? "a pin" : " and a pin";
  }
  return text;
}

Error NotResident(std::string_view text) {
  return Error{ErrorCode::kNotFound, "no resident model is called '" + std::string(text) + "'", 0};
}

}  // namespace

std::uint64_t CatalogCounters::AllMisses() const {
  return std::accumulate(misses.begin(), misses.end(), std::uint64_t{0});
}

const ResidentModel* Catalog::Find(const ModelId& id) const {
  auto found = models_.find(id);
  return found == models_.end() ? nullptr : &found->second;
}

const ResidentModel* Catalog::FindCall(std::string_view path) const {
  for (const auto& [id, model] : models_) {
    if (!model.superseded && model.path == path) {
      return &model;
    }
  }
  return nullptr;
}

Result<ModelId> Catalog::Resolve(std::string_view text) const {
  if (text.starts_with(kCallPrefix)) {
    // A superseded entry is known by its id alone: who asks for the call must not get it.
    const ResidentModel* call = FindCall(text);
    return call != nullptr ? Result<ModelId>(call->id) : NotResident(text);
  }
  if (auto id = ModelId::FromHex(text); id && Find(*id) != nullptr) {
    return *id;
  }
  std::vector<const ResidentModel*> named;
  std::vector<const ResidentModel*> prefixed;
  for (const auto& [id, model] : models_) {
    if (model.name == text || model.path == text || DefaultName(model.files) == text) {
      named.push_back(&model);
    } else if (text.size() >= kMinPrefixDigits && id.Hex().starts_with(text)) {
      prefixed.push_back(&model);
    }
  }
  std::vector<const ResidentModel*>& matches = named.empty() ? prefixed : named;
  if (matches.size() > 1) {
    std::erase_if(matches, [](const ResidentModel* model) { return model->superseded; });
  }
  if (matches.size() == 1) {
    return matches.front()->id;
  }
  if (matches.empty()) {
    return NotResident(text);
  }
  std::string message =
      "'" + std::string(text) + "' means " + std::to_string(matches.size()) + " resident models:";
  for (const ResidentModel* model : matches) {
    message += " " + model->id.Hex();
  }
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

void Catalog::CountHit(const ModelId& id, TimePoint now) {
  ResidentModel& model = models_.at(id);
  ++model.hits;
  ++counters_.hits;
  history_.Hit(model.path, now);
}

LeaseId Catalog::Lease(const ModelId& id, SessionId session, TimePoint now,
                       std::uint32_t request_id) {
  ResidentModel& model = models_.at(id);
  ++model.leases;
  model.last_used = now;
  const LeaseId lease{++last_lease_};
  leases_.emplace(std::pair(session, lease), LeaseEntry{id, request_id});
  lease_of_request_[std::pair(session, request_id)] = lease;
  ++lease_counts_[session];
  return lease;
}

std::size_t Catalog::LeaseCount(SessionId session) const {
  auto found = lease_counts_.find(session);
  return found == lease_counts_.end() ? 0 : found->second;
}

void Catalog::CountLeaseOut(SessionId session) {
  if (auto found = lease_counts_.find(session); --found->second == 0) {
    lease_counts_.erase(found);
  }
}

void Catalog::SetPinned(const ModelId& id, bool pinned, TimePoint now) {
  ResidentModel& model = models_.at(id);
  if (model.pinned == pinned) {
    return;
  }
  model.pinned = pinned;
  history_.Add(model.path, pinned ? "pin" : "unpin", "on request", now);
}

MissReason Catalog::RecordMiss(const Wanted& wanted, TimePoint now) {
  MissReason reason = history_.ExplainMiss(wanted, now);
  ++counters_.misses[static_cast<std::size_t>(reason.kind)];
  history_.Load(wanted, reason.text, now);
  Supersede(wanted, now);
  return reason;
}

bool Catalog::DropCarriedPin(const std::string& path, TimePoint now) {
  if (carried_pins_.erase(path) == 0) {
    return false;
  }
  history_.Add(path, "unpin", "on request", now);
  return true;
}

void Catalog::Supersede(const Wanted& wanted, TimePoint now) {
  std::vector<ModelId> unused;
  for (auto& [id, model] : models_) {
    if (!Supersedes(wanted.files, model.identities)) {
      continue;
    }
    MarkSuperseded(model, wanted.path);
    if (model.leases == 0) {
      unused.push_back(id);
    }
  }
  for (const ModelId& id : unused) {
    history_.Add(wanted.path, "superseded", "the file changed", now);
    Drop(id);
  }
}

void Catalog::MarkSuperseded(ResidentModel& model, const std::string& path) {
  if (model.pinned && carried_pins_.size() < kMaxHistoryPaths) {
    carried_pins_.insert(path);
  }
  model.pinned = false;
  model.superseded = true;
}

void Catalog::Retire(const ModelId& id, const std::string& why, TimePoint now) {
  ResidentModel& model = models_.at(id);
  MarkSuperseded(model, model.path);
  if (model.leases == 0) {
    history_.Add(model.path, "superseded", why, now);
    Drop(id);
  }
}

void Catalog::Reinstate(const ModelId& id, TimePoint now) {
  ResidentModel& model = models_.at(id);
  if (!model.superseded) {
    return;
  }
  model.superseded = false;
  Wanted wanted;
  wanted.id = id;
  wanted.path = model.path;
  wanted.files = model.identities;
  Supersede(wanted, now);
  model.pinned = carried_pins_.erase(model.path) > 0 || model.pinned;
}

const ResidentModel* Catalog::Leased(SessionId session, LeaseId lease) const {
  auto found = leases_.find(std::pair(session, lease));
  return found == leases_.end() ? nullptr : Find(found->second.model);
}

bool Catalog::Release(SessionId session, LeaseId lease, TimePoint now) {
  auto found = leases_.find(std::pair(session, lease));
  if (found == leases_.end()) {
    return false;
  }
  EndLease(found, now);
  return true;
}

bool Catalog::ReleaseOf(SessionId session, std::uint32_t request_id, TimePoint now) {
  auto found = lease_of_request_.find(std::pair(session, request_id));
  return found != lease_of_request_.end() && Release(session, found->second, now);
}

void Catalog::EndSession(SessionId session, TimePoint now) {
  auto first = leases_.lower_bound(std::pair(session, LeaseId{0}));
  while (first != leases_.end() && first->first.first == session) {
    first = EndLease(first, now);
  }
}

Catalog::Leases::iterator Catalog::EndLease(Leases::iterator lease, TimePoint now) {
  const SessionId session = lease->first.first;
  const ModelId id = lease->second.model;
  // A request id that was used again belongs to the younger lease.
  const auto request = lease_of_request_.find(std::pair(session, lease->second.request_id));
  if (request != lease_of_request_.end() && request->second == lease->first.second) {
    lease_of_request_.erase(request);
  }
  const Leases::iterator next = leases_.erase(lease);
  CountLeaseOut(session);
  ResidentModel& model = models_.at(id);
  model.last_used = now;
  if (--model.leases == 0 && model.superseded && !model.pinned) {
    history_.Add(model.path, "superseded", "the file changed; its last lease ended", now);
    Drop(id);
  }
  return next;
}

void Catalog::Insert(ResidentModel model, TimePoint now) {
  for (const ArenaRef& arena : model.arenas) {
    arenas_.Use(arena.id);
  }
  storages_.Add(model.places);
  model.last_used = now;
  model.pinned = carried_pins_.erase(model.path) > 0 || model.pinned;
  const ModelId id = model.id;
  models_.emplace(id, std::move(model));
}

void Catalog::Drop(const ModelId& id) {
  auto found = models_.find(id);
  storages_.Remove(found->second.places);
  for (const ArenaRef& arena : found->second.arenas) {
    arenas_.Unuse(arena.id);
  }
  models_.erase(found);
}

Result<void> Catalog::Evict(const ModelId& id, const std::string& why, TimePoint now) {
  const ResidentModel& model = models_.at(id);
  if (model.leases > 0 || model.pinned) {
    return Error{ErrorCode::kInUse, "model " + model.name + " is held by " + UseText(model), 0};
  }
  const std::uint64_t closing_before = arenas_.closing_bytes();
  if (model.superseded) {
    history_.Add(model.path, "superseded", why, now);
  } else {
    history_.Evicted(model.path, model.options, why, now);
  }
  Drop(id);
  ++counters_.evictions;
  counters_.evicted_bytes += arenas_.closing_bytes() - closing_before;
  return {};
}

EvictionProblem Catalog::Problem(std::uint64_t need_bytes) const {
  EvictionProblem problem;
  problem.need_bytes = need_bytes;
  std::unordered_map<ArenaId, std::size_t> numbers;
  for (const auto& [id, model] : models_) {
    if (model.leases > 0 || model.pinned) {
      continue;
    }
    PlannedModel planned{id,
                         model.superseded ? TimePoint::min() : model.last_used,
                         model.load_seconds,
                         model.hits,
                         {}};
    for (const ArenaRef& arena : model.arenas) {
      auto [number, added] = numbers.try_emplace(arena.id, problem.arenas.size());
      if (added) {
        const ArenaEntry* entry = arenas_.Find(arena.id);
        problem.arenas.push_back({entry->cost_bytes, entry->users});
      }
      planned.arenas.push_back(number->second);
    }
    problem.models.push_back(std::move(planned));
  }
  return problem;
}

bool Catalog::Fits(std::uint64_t need_bytes) const {
  const std::uint64_t used =
      arenas_.resident_bytes() + arenas_.reserved_bytes() + arenas_.closing_bytes();
  return need_bytes <= SaturatingSub(memory_budget_bytes_, used);
}

Error Catalog::NoRoom(std::uint64_t need_bytes, std::uint64_t promised_bytes) const {
  const EvictionProblem all = Problem(std::numeric_limits<std::uint64_t>::max());
  std::vector<std::size_t> every(all.models.size());
  std::iota(every.begin(), every.end(), std::size_t{0});
  const std::uint64_t held = arenas_.resident_bytes() - FreedBytes(all, every);
  return Error{ErrorCode::kNoRoom,
               "the model needs " + std::to_string(need_bytes) + " bytes, the memory budget is " +
                   std::to_string(memory_budget_bytes_) + " bytes, of which " +
                   std::to_string(held) + " are held by leases and pins and " +
                   std::to_string(arenas_.reserved_bytes() + promised_bytes) +
                   " are promised to other loads",
               0};
}

Result<void> Catalog::MakeRoom(std::uint64_t need_bytes, std::uint64_t promised_bytes,
                               TimePoint now) {
  const std::uint64_t taken = arenas_.resident_bytes() + arenas_.reserved_bytes() + promised_bytes;
  const std::uint64_t free = SaturatingSub(memory_budget_bytes_, taken);
  if (need_bytes <= free && taken <= memory_budget_bytes_) {
    return {};
  }
  if (need_bytes > memory_budget_bytes_) {
    return NoRoom(need_bytes, promised_bytes);
  }
  const std::uint64_t missing = need_bytes - free + SaturatingSub(taken, memory_budget_bytes_);
  std::optional<EvictionPlan> plan = planner_.Plan(Problem(missing));
  if (!plan) {
    return NoRoom(need_bytes, promised_bytes);
  }
  for (const ModelId& id : plan->models) {
    if (auto evicted = Evict(id, "to make room: " + plan->why, now); !evicted.ok()) {
      return evicted;
    }
  }
  return {};
}

ModelInfo Catalog::Describe(const ResidentModel& model, TimePoint now) const {
  ModelInfo info;
  info.id = model.id;
  info.name = model.name;
  info.path = model.path;
  info.format = model.format;
  info.state = "resident";
  info.tensors = model.tensors;
  info.storages = model.storages;
  info.arenas = static_cast<std::uint32_t>(model.arenas.size());
  for (std::size_t i = model.borrowed_arenas; i < model.arenas.size(); ++i) {
    const ArenaEntry* entry = arenas_.Find(model.arenas[i].id);
    info.resident_bytes += entry == nullptr ? 0 : entry->cost_bytes;
  }
  for (const StoragePlace& place : model.places) {
    info.storage_bytes += place.size_bytes;
    const auto borrowed_end =
        model.arenas.begin() + static_cast<std::ptrdiff_t>(model.borrowed_arenas);
    const bool borrowed =
        std::any_of(model.arenas.begin(), borrowed_end,
                    [&](const ArenaRef& arena) { return arena.id == place.arena; });
    info.borrowed_bytes += borrowed ? place.size_bytes : 0;
  }
  info.leases = model.leases;
  info.pinned = model.pinned;
  info.hits = model.hits;
  info.load_seconds = model.load_seconds;
  info.idle_seconds = Seconds(now - model.last_used);
  return info;
}

}  // namespace modelcache
