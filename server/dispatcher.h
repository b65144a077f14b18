// Dispatcher: a decoded request or an event in, actions out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/messages.h"
#include "server/actions.h"
#include "server/calls.h"
#include "server/catalog.h"
#include "server/jobs.h"

namespace modelcache {

struct DaemonFacts {
  std::int64_t pid = 0;
  std::string socket;
  TimePoint started;
  Digest seed{};  // random: ids of calls' entries are never those of an earlier daemon
};

// Where a reply goes.
struct Caller {
  SessionId session;
  std::uint32_t request_id = 0;
  bool own_user = false;  // the peer's user is the daemon's
};

// A file that came with an open; `stat` is what fstat says of `fd`.
struct OpenedFile {
  UniqueFd fd;
  FileStat stat;
};

// Logic only: no sockets, no clock reads, no logging; not synchronised. Times passed in must not go
// back. Every answer to the outside is an action.
class Dispatcher {
 public:
  Dispatcher(std::uint64_t memory_budget_bytes, const RecomputePlanner& planner, JobLimits limits,
             DaemonFacts facts)
      : catalog_(memory_budget_bytes, planner),
        limits_(limits),
        jobs_(catalog_, limits),
        facts_(std::move(facts)),
        calls_(facts_.seed) {}

  // Requests of clients. `files` has one entry per descriptor that came along.
  Actions OnOpen(Caller from, const OpenRequest& request, std::vector<OpenedFile> files,
                 TimePoint now);
  // Withdraws an open or a verify: one that waits gets no answer any more, and the lease of an
  // answer that is on its way ends.
  Actions OnCancel(Caller from, TimePoint now);
  Actions OnRelease(SessionId session, const ReleaseRequest& request, TimePoint now);
  Actions OnArenaDescriptors(Caller from, const ArenaDescriptorsRequest& request);
  Actions OnList(Caller from, TimePoint now);
  Actions OnStatus(Caller from, TimePoint now);
  Actions OnWhy(Caller from, const ModelRequest& request, TimePoint now);
  Actions OnEvict(Caller from, const ModelRequest& request, TimePoint now);
  Actions OnPin(Caller from, const PinRequest& request, TimePoint now);
  Actions OnVerify(Caller from, const ModelRequest& request, TimePoint now);
  Actions OnMetrics(Caller from, TimePoint now);
  Actions OnShutdown(Caller from, TimePoint now);

  void OnConnected() { ++clients_; }
  Actions OnDisconnected(SessionId session, TimePoint now);

  // Requests and events of loaders, see Jobs.
  Actions OnCandidates(JobId job, std::uint32_t request_id, const CandidatesRequest& request);
  Actions OnReserve(JobId job, std::uint32_t request_id, ReserveRequest request, TimePoint now);
  Actions OnCommit(JobId job, std::uint32_t request_id, const CommitRequest& request);
  Actions OnLoaderProgress(JobId job, const LoaderProgressEvent& event);
  Actions OnVerified(JobId job, const VerifiedEvent& event, TimePoint now);
  Actions OnLoaderFailed(JobId job, const Error& error, TimePoint now);
  Actions OnLoaderExit(JobId job, const std::optional<Error>& error, TimePoint now);

  // Answers of the arena store.
  Actions OnArenasCreated(JobId job, Result<std::vector<ArenaEntry>> created, TimePoint now);
  Actions OnSealed(JobId job, Result<SealedModel> sealed, TimePoint now);
  Actions OnArenaClosed(const ArenaId& arena, TimePoint now);
  void OnArenaMeasured(const ArenaId& arena, std::uint64_t allocated_bytes);

  // The daemon is told to stop: waiters are refused, jobs cancelled, later opens refused.
  Actions OnStop(TimePoint now);

  [[nodiscard]] TimePoint NextDeadline() const { return jobs_.NextDeadline(); }
  Actions OnTick(TimePoint now);

  [[nodiscard]] StatusReply Status(TimePoint now) const;
  [[nodiscard]] std::string MetricsText(TimePoint now) const;
  [[nodiscard]] std::size_t job_count() const { return jobs_.count(); }
  [[nodiscard]] const Catalog& catalog() const { return catalog_; }

 private:
  Actions Finish(Actions actions);
  [[nodiscard]] std::optional<Error> CheckOpen(const OpenRequest& request,
                                               std::size_t descriptors) const;
  [[nodiscard]] std::optional<Error> CheckCaller(Caller from) const;
  void OpenResident(const Waiter& waiter, const OpenRequest& request, const ModelId& id,
                    TimePoint now, Actions& out);
  void OpenByName(const Waiter& waiter, const OpenRequest& request, TimePoint now, Actions& out);
  void StartLoad(Waiter waiter, const OpenRequest& request, const ModelId& id,
                 std::vector<OpenedFile> files, TimePoint now, Actions& out);
  void BeginLoad(Waiter waiter, LoadSpec spec, TimePoint now, Actions& out);
  void OpenCall(Waiter waiter, const OpenRequest& request, UniqueFd payload, TimePoint now,
                Actions& out);
  void StartCall(Waiter waiter, const OpenRequest& request, UniqueFd payload, TimePoint now,
                 Actions& out);

  Catalog catalog_;
  JobLimits limits_;
  Jobs jobs_;
  DaemonFacts facts_;
  Calls calls_;
  std::uint64_t clients_ = 0;
  bool stopping_ = false;
};

}  // namespace modelcache
