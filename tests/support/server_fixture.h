// ServerFixture: a dispatcher, a fake clock, and a loader and arena store that answer when told.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/dispatcher.h"
#include "tests/support/fake_clock.h"

namespace modelcache {

// The actions of one type, in order.
template <typename Wanted>
std::vector<const Wanted*> Only(const Actions& actions) {
  std::vector<const Wanted*> found;
  for (const Action& action : actions) {
    if (const auto* wanted = std::get_if<Wanted>(&action)) {
      found.push_back(wanted);
    }
  }
  return found;
}

// The first body of this type sent to a client, or nullptr.
template <typename Body>
const Body* SentBody(const Actions& actions) {
  for (const SendToClient* send : Only<SendToClient>(actions)) {
    if (const auto* body = std::get_if<Body>(&send->body)) {
      return body;
    }
  }
  return nullptr;
}

// The first refusal sent to a client, or nullptr.
inline const ErrorReply* Refusal(const Actions& actions) { return SentBody<ErrorReply>(actions); }

struct ServerFixture {
  explicit ServerFixture(std::uint64_t budget_bytes = 1000, JobLimits job_limits = {})
      : dispatcher(budget_bytes, planner, job_limits, DaemonFacts{42, "/run/x", clock.Now()}) {}

  FakeClock clock;
  LruPlanner planner;
  Dispatcher dispatcher;
  std::uint8_t last_arena = 0;
  std::uint32_t last_request = 1000;

  static FileStat Stat(std::uint64_t inode, std::uint64_t size_bytes = 72) {
    return FileStat{1, inode, size_bytes, 1000, 2000};
  }

  static OpenRequest Request(const std::string& path) {
    OpenRequest request;
    request.files.push_back({path.substr(path.rfind('/') + 1), path});
    return request;
  }

  // `request_id` 0: a fresh one.
  Actions Open(std::uint64_t session, const OpenRequest& request, const FileStat& stat,
               std::uint32_t request_id = 0) {
    if (request_id == 0) {
      request_id = ++last_request;
    }
    std::vector<OpenedFile> files;
    files.push_back({UniqueFd(), stat});
    return dispatcher.OnOpen({SessionId{session}, request_id}, request, std::move(files),
                             clock.Now());
  }

  static JobId StartedJob(const Actions& actions) {
    auto started = Only<StartJob>(actions);
    return started.empty() ? JobId{} : started.front()->job;
  }

  Actions Reserve(JobId job, std::uint64_t bytes, std::vector<ArenaId> borrowed = {}) {
    ReserveRequest request;
    request.arenas.push_back({bytes, bytes});
    request.borrowed = std::move(borrowed);
    return dispatcher.OnReserve(job, 7, request, clock.Now());
  }

  // What the arena store would answer to the CreateArenas among `actions`.
  Actions Create(const Actions& actions, std::vector<ArenaId>* made = nullptr) {
    const CreateArenas& create = *Only<CreateArenas>(actions).front();
    std::vector<ArenaEntry> entries;
    for (const ReserveArena& arena : create.arenas) {
      ArenaEntry entry;
      entry.id.bytes[0] = ++last_arena;
      entry.fd = 100 + last_arena;
      entry.inode = 1000U + last_arena;
      entry.size_bytes = arena.size_bytes;
      entry.cost_bytes = arena.charge_bytes;
      entries.push_back(entry);
      if (made != nullptr) {
        made->push_back(entry.id);
      }
    }
    return dispatcher.OnArenasCreated(create.job, entries, clock.Now());
  }

  // A sealed model with one storage of `bytes` in its own first arena and those in `more`.
  static SealedModel Sealed(const std::vector<ArenaId>& own, std::uint64_t bytes,
                            const std::vector<StoragePlace>& more = {}) {
    SealedModel sealed;
    sealed.format = "safetensors";
    sealed.tensors = 1;
    sealed.storages = 1;
    sealed.places.push_back({own.front(), 64, bytes, Digest{}});
    sealed.places.insert(sealed.places.end(), more.begin(), more.end());
    sealed.allocated_bytes.emplace_back(own.front(), bytes);
    return sealed;
  }

  // Reserve, create, commit and seal of one arena; gives the actions of the seal.
  Actions Load(JobId job, std::uint64_t bytes) {
    std::vector<ArenaId> own;
    (void)Create(Reserve(job, bytes), &own);
    (void)dispatcher.OnCommit(job, 8, CommitRequest{});
    return dispatcher.OnSealed(job, Sealed(own, bytes), clock.Now());
  }

  Actions Exit(JobId job) { return dispatcher.OnLoaderExit(job, std::nullopt, clock.Now()); }

  // A resident model without leases; gives its id.
  ModelId Resident(const std::string& path, const FileStat& stat, std::uint64_t bytes) {
    const std::uint64_t session = 9000;
    const JobId job = StartedJob(Open(session, Request(path), stat));
    const Actions sealed = Load(job, bytes);
    const OpenReply* reply = SentBody<OpenReply>(sealed);
    const ModelId id = reply == nullptr ? ModelId{} : reply->model_id;
    (void)Exit(job);
    (void)dispatcher.OnRelease(SessionId{session},
                               ReleaseRequest{reply == nullptr ? 0 : reply->lease}, clock.Now());
    clock.Advance(std::chrono::seconds(1));
    return id;
  }

  StatusReply Status() { return dispatcher.Status(clock.Now()); }
};

}  // namespace modelcache
