// Jobs: loader processes that are queued or running, and the requests that wait for them.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/messages.h"
#include "server/actions.h"
#include "server/catalog.h"

namespace modelcache {

struct JobLimits {
  std::size_t max_running = 4;  // loads and verifications at once; others queue
  Duration load_timeout = std::chrono::minutes(30);
  std::uint64_t arena_max_bytes = 1U << 30U;
  std::uint64_t collapse_from_bytes = 4U << 20U;  // smaller models gain nothing from huge pages
  std::size_t max_waiting_per_session = 64;       // opens and verifications without an answer
  std::size_t max_leases_per_session = 65536;
  std::size_t max_queued_descriptors = 256;  // of files, held by all queued loads together
};

// A request that is answered when its job is done.
struct Waiter {
  SessionId session;
  std::uint32_t request_id = 0;
  TimePoint deadline = kNoDeadline;
  bool want_descriptors = false;
  bool want_progress = false;
  std::string reason;  // of the miss
};

// Everything a load needs.
struct LoadSpec {
  Wanted wanted;
  std::string name;
  std::vector<FileRef> refs;
  std::vector<UniqueFd> files;
  bool pin = false;
  std::optional<Launch> launch;  // of the call's own loader
};

struct JobCounters {
  std::uint64_t loads = 0;
  std::uint64_t failed_loads = 0;
  std::uint64_t cancelled_loads = 0;
  double load_seconds = 0;
};

// The reply to an open of a resident model; takes the lease.
SendToClient OpenedReply(Catalog& catalog, const ModelId& id, const Waiter& waiter, TimePoint now);

// The refusal of a request.
SendToClient RefusedReply(const Waiter& waiter, MessageType type, const Error& error);

// Logic only. One load per model; the loader events below name a job and are ignored for a job that
// is gone. All calls append what is to be done to `out`.
class Jobs {
 public:
  Jobs(Catalog& catalog, JobLimits limits) : catalog_(catalog), limits_(limits) {}

  // Adds a waiter to the running load of `id`; false when there is none.
  bool Join(const ModelId& id, Waiter waiter, bool pin);
  // The model that the load of this call, if one runs, will make.
  [[nodiscard]] std::optional<ModelId> LoadingCall(std::string_view path) const;
  // The path of the call that this job loads; nullptr when it does something else or is over.
  [[nodiscard]] const std::string* CallOf(JobId id) const;
  // REQUIRES that no load of this model runs.
  void Load(LoadSpec spec, Waiter waiter, TimePoint now, Actions& out);
  // REQUIRES a resident model.
  void Verify(const ResidentModel& model, Waiter waiter, TimePoint now, Actions& out);

  // kLimit when a load of so many files would have to queue and may not.
  [[nodiscard]] std::optional<Error> CheckQueue(std::size_t descriptors) const;
  // Requests of a session that wait for a job.
  [[nodiscard]] std::size_t WaitingCount(SessionId session) const;
  [[nodiscard]] bool IsWaiting(SessionId session, std::uint32_t request_id) const;

  // Forgets a waiter, if it still waits; a load nobody waits for any more is cancelled.
  void Withdraw(SessionId session, std::uint32_t request_id, TimePoint now, Actions& out);
  // Forgets the waiters of a session; loads nobody waits for any more are cancelled.
  void EndSession(SessionId session, TimePoint now, Actions& out);
  // Refuses all waiters and cancels everything.
  void Shutdown(TimePoint now, Actions& out);

  // The earliest moment at which OnTick has something to do; kNoDeadline when there is none.
  [[nodiscard]] TimePoint NextDeadline() const;
  void OnTick(TimePoint now, Actions& out);

  // What loaders say.
  void OnCandidates(JobId id, std::uint32_t request_id, const CandidatesRequest& request,
                    Actions& out);
  void OnReserve(JobId id, std::uint32_t request_id, ReserveRequest request, TimePoint now,
                 Actions& out);
  void OnCommit(JobId id, std::uint32_t request_id, const CommitRequest& request, Actions& out);
  void OnProgress(JobId id, const LoaderProgressEvent& event, Actions& out);
  void OnVerified(JobId id, const VerifiedEvent& event, TimePoint now, Actions& out);
  // The loader said it failed, or broke the protocol: waiters learn why, the process is killed.
  void OnFailed(JobId id, const Error& error, TimePoint now, Actions& out);
  // The process is gone; `error` says how if it did not exit with 0.
  void OnExit(JobId id, const std::optional<Error>& error, TimePoint now, Actions& out);

  // Stops making huge pages for a model that is gone; its memory comes back when that ended.
  void DropStaleCollapse(Actions& out);

  // What the arena store answers.
  void OnArenasCreated(JobId id, Result<std::vector<ArenaEntry>> created, TimePoint now,
                       Actions& out);
  void OnSealed(JobId id, Result<SealedModel> sealed, TimePoint now, Actions& out);
  // Memory came back: reservations that wait for it may go on.
  void OnRoom(TimePoint now, Actions& out);

  // Models that are being loaded, for lists.
  [[nodiscard]] std::vector<ModelInfo> Loading(TimePoint now) const;
  [[nodiscard]] bool IsLoading(std::string_view path_or_name) const;
  [[nodiscard]] std::size_t loading_count() const { return loading_.size(); }
  [[nodiscard]] std::size_t count() const { return jobs_.size(); }
  [[nodiscard]] const JobCounters& counters() const { return counters_; }

 private:
  enum class Phase : std::uint8_t {
    kQueued,
    kRunning,
    kSealing,   // committed, being validated
    kFinished,  // answered; the process is about to exit
    kDying,     // failed or cancelled; the process is being killed
  };
  struct Job {
    JobId id;
    Phase phase = Phase::kQueued;
    JobRequest request;
    LoadSpec spec;  // of a load
    std::string name;
    std::vector<Waiter> waiters;
    TimePoint deadline = kNoDeadline;
    TimePoint started;
    std::set<ArenaId> held;  // arenas it is a user of, or …
    bool lingers = false;    // … only lingers on: it can be killed at any time
    std::vector<ArenaId> borrowed;
    std::vector<ArenaId> own;
    std::optional<std::uint32_t> reserve_id;  // request id of its only reservation
    ReserveRequest reserve;
    std::uint64_t charge_bytes = 0;
    std::uint32_t commit_id = 0;
    std::uint64_t bytes_read = 0;  // of the files, as the loader says
  };
  // A waiter's deadline, or with session 0 the job's own.
  struct Deadline {
    TimePoint at;
    JobId job;
    SessionId session;
    std::uint32_t request_id = 0;
    auto operator<=>(const Deadline&) const = default;
  };

  Job* Find(JobId id);
  Job* FindIn(JobId id, Phase phase);
  JobId NewJob(JobKind kind);
  void AddWaiter(Job& job, Waiter waiter);
  // The waiter is about to leave the job.
  void CountOut(const Job& job, const Waiter& waiter);
  // Forgets the waiters `leaves` is true for; what nobody waits for any more is cancelled.
  template <typename Predicate>
  void RemoveWaiters(Predicate leaves, TimePoint now, Actions& out);
  void SetDeadline(Job& job, TimePoint at);
  void Hold(Job& job, const ArenaId& arena);
  void Unhold(Job& job, const ArenaId& arena);
  void Linger(Job& job);
  void HoldAll(Job& job, const ResidentModel& model, std::size_t first);

  void Pump(TimePoint now, Actions& out);
  void Start(Job& job, TimePoint now, Actions& out);
  void StartCollapse(TimePoint now, Actions& out);
  void PauseCollapse(Actions& out);

  void RefuseWaiters(Job& job, const Error& error, Actions& out);
  void Abandon(Job& job, Actions& out);
  void CancelIfUnwanted(Job& job, TimePoint now, Actions& out);
  void FailLoad(Job& job, const Error& error, TimePoint now, Actions& out);
  Result<std::uint64_t> CheckReserve(const Job& job, const ReserveRequest& request) const;
  [[nodiscard]] std::uint64_t PromisedBytes() const;
  ResidentModel MakeModel(Job& job, SealedModel sealed, TimePoint now) const;
  void Publish(Job& job, TimePoint now, Actions& out);
  void AwaitExit(Job& job, TimePoint now);
  void Forget(Job& job);

  Catalog& catalog_;
  JobLimits limits_;
  std::map<JobId, Job> jobs_;
  std::unordered_map<ModelId, JobId> loading_;
  std::deque<JobId> queue_;  // loads and verifications that wait for a place
  std::size_t queued_descriptors_ = 0;
  std::unordered_map<SessionId, std::set<std::uint32_t>> waiting_;  // request ids
  std::deque<ModelId> to_collapse_;
  JobId collapse_;                    // the running one; 0 when none
  std::deque<JobId> reserving_;       // granted in this order
  std::uint64_t creating_bytes_ = 0;  // granted, but the arenas do not exist yet
  std::set<Deadline> deadlines_;
  std::size_t running_ = 0;  // collapse jobs not counted
  std::uint64_t last_job_ = 0;
  JobCounters counters_;
};

}  // namespace modelcache
