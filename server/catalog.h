// Catalog: resident models, their leases and pins, and what memory they and running jobs hold.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/ids.h"
#include "common/result.h"
#include "proto/messages.h"
#include "server/arena_table.h"
#include "server/history.h"
#include "server/identity.h"
#include "server/recompute_planner.h"
#include "server/storage_index.h"

namespace modelcache {

// What the arena store found in the sealed arenas of one load.
struct SealedModel {
  std::string format;
  std::uint64_t tensors = 0;
  std::uint64_t storages = 0;
  std::vector<StoragePlace> places;                                // distinct, not empty
  std::vector<std::pair<ArenaId, std::uint64_t>> allocated_bytes;  // of the own arenas
};

// A resident model.
struct ResidentModel {
  ModelId id;
  std::string name;
  std::string path;
  std::string format;
  LoadOptions options;
  std::vector<FileRef> files;
  std::vector<FileIdentity> identities;
  std::vector<ArenaRef> arenas;  // as clients are told: borrowed first, then own
  std::size_t borrowed_arenas = 0;
  std::vector<StoragePlace> places;
  std::uint64_t tensors = 0;
  std::uint64_t storages = 0;
  std::uint32_t leases = 0;
  bool pinned = false;
  bool superseded = false;  // the file at its path is another one by now
  std::uint64_t hits = 0;
  double load_seconds = 0;
  TimePoint last_used;
};

struct CatalogCounters {
  std::uint64_t hits = 0;
  std::array<std::uint64_t, kMissKindCount> misses{};
  std::uint64_t evictions = 0;
  std::uint64_t evicted_bytes = 0;
  [[nodiscard]] std::uint64_t AllMisses() const;
};

// Logic only: no sockets, no clock, no logging, not synchronised. Arenas that nobody needs any more
// appear in arenas().TakeUnused() after any call.
class Catalog {
 public:
  Catalog(std::uint64_t memory_budget_bytes, const RecomputePlanner& planner)
      : memory_budget_bytes_(memory_budget_bytes), planner_(planner) {}

  // The resident model of this id, or nullptr. Valid until the model is dropped.
  [[nodiscard]] const ResidentModel* Find(const ModelId& id) const;

  // The resident model that a person means by an id, an unambiguous prefix of one (6 digits or
  // more), a name or a path. Errors: kNotFound, kInvalidArgument (ambiguous).
  [[nodiscard]] Result<ModelId> Resolve(std::string_view text) const;

  // The resident model at this path that nothing superseded, or nullptr. REQUIRES the path of a
  // call: two models of files may share one.
  [[nodiscard]] const ResidentModel* FindCall(std::string_view path) const;

  // Counts and records a hit. REQUIRES a resident model, as the next three.
  void CountHit(const ModelId& id, TimePoint now);
  // `request_id`: of the open that gets the lease, for ReleaseOf.
  LeaseId Lease(const ModelId& id, SessionId session, TimePoint now, std::uint32_t request_id = 0);
  void SetPinned(const ModelId& id, bool pinned, TimePoint now);

  // Why `wanted` is a miss; records it, and drops entries that the new identity supersedes (with
  // their leases' end where they are leased). The pin of one is carried to the next model of that
  // path that becomes resident, however many loads fail until then.
  MissReason RecordMiss(const Wanted& wanted, TimePoint now);
  [[nodiscard]] bool CarriesPin(const std::string& path) const {
    return carried_pins_.contains(path);
  }
  // False when no pin is carried to this path.
  bool DropCarriedPin(const std::string& path, TimePoint now);
  // The files of a superseded model were found at its path again: it supersedes what superseded it.
  void Reinstate(const ModelId& id, TimePoint now);
  // The model is out of date: it goes with its last lease, and a pin passes to the next of its
  // path. REQUIRES a resident model.
  void Retire(const ModelId& id, const std::string& why, TimePoint now);
  void CountJoin() { ++counters_.misses[static_cast<std::size_t>(MissKind::kJoinedLoad)]; }

  // The model of a lease of this session, or nullptr.
  [[nodiscard]] const ResidentModel* Leased(SessionId session, LeaseId lease) const;
  // False when this session has no such lease.
  bool Release(SessionId session, LeaseId lease, TimePoint now);
  // Ends the lease this open of the session got. False when there is none.
  bool ReleaseOf(SessionId session, std::uint32_t request_id, TimePoint now);
  // The number is used for another request: a lease it got before is none of that one's.
  void ForgetRequest(SessionId session, std::uint32_t request_id) {
    lease_of_request_.erase(std::pair(session, request_id));
  }
  void EndSession(SessionId session, TimePoint now);

  // Makes a model resident; it becomes a user of all its arenas. REQUIRES that they live and that
  // the model is not resident.
  void Insert(ResidentModel model, TimePoint now);

  // Errors: kInUse naming leases or the pin.
  Result<void> Evict(const ModelId& id, const std::string& why, TimePoint now);

  // Evicts as planned until `need_bytes` more fit besides `promised_bytes`, counting memory on its
  // way out as free. Errors: kNoRoom with both numbers; then nothing was evicted.
  Result<void> MakeRoom(std::uint64_t need_bytes, std::uint64_t promised_bytes, TimePoint now);

  // True when `need_bytes` fit right now, memory on its way out included as used.
  [[nodiscard]] bool Fits(std::uint64_t need_bytes) const;

  [[nodiscard]] ModelInfo Describe(const ResidentModel& model, TimePoint now) const;
  [[nodiscard]] const std::unordered_map<ModelId, ResidentModel>& models() const { return models_; }

  [[nodiscard]] ArenaTable& arenas() { return arenas_; }
  [[nodiscard]] const ArenaTable& arenas() const { return arenas_; }
  [[nodiscard]] const StorageIndex& storages() const { return storages_; }
  [[nodiscard]] History& history() { return history_; }
  [[nodiscard]] const History& history() const { return history_; }
  [[nodiscard]] const CatalogCounters& counters() const { return counters_; }
  [[nodiscard]] std::size_t lease_count() const { return leases_.size(); }
  [[nodiscard]] std::size_t LeaseCount(SessionId session) const;
  [[nodiscard]] std::uint64_t memory_budget_bytes() const { return memory_budget_bytes_; }

 private:
  struct LeaseEntry {
    ModelId model;
    std::uint32_t request_id = 0;
  };
  using Leases = std::map<std::pair<SessionId, LeaseId>, LeaseEntry>;

  [[nodiscard]] EvictionProblem Problem(std::uint64_t need_bytes) const;
  [[nodiscard]] Error NoRoom(std::uint64_t need_bytes, std::uint64_t promised_bytes) const;
  void Drop(const ModelId& id);
  Leases::iterator EndLease(Leases::iterator lease, TimePoint now);
  void Supersede(const Wanted& wanted, TimePoint now);
  void MarkSuperseded(ResidentModel& model, const std::string& path);
  void CountLeaseOut(SessionId session);

  std::uint64_t memory_budget_bytes_;
  const RecomputePlanner& planner_;
  std::unordered_map<ModelId, ResidentModel> models_;
  Leases leases_;
  std::map<std::pair<SessionId, std::uint32_t>, LeaseId> lease_of_request_;
  std::unordered_map<SessionId, std::size_t> lease_counts_;
  std::uint64_t last_lease_ = 0;
  std::unordered_set<std::string> carried_pins_;  // paths; at most kMaxHistoryPaths
  ArenaTable arenas_;
  StorageIndex storages_;
  History history_;
  CatalogCounters counters_;
};

}  // namespace modelcache
