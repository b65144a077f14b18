// Memory of loads: reserved, shared, sealed, backed with huge pages.
#include "server/dispatcher.h"

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

TEST_CASE("Dispatcher: a reservation waits until evicted memory is really back", "[unit]") {
  ServerFixture f(1000);
  f.Resident("/old", f.Stat(1), 600);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/new"), f.Stat(2)));
  const Actions reserved = f.Reserve(job, 700);
  CHECK(Only<CreateArenas>(reserved).empty());
  const auto closing = Only<CloseArenas>(reserved);
  REQUIRE(closing.size() == 1);
  CHECK(f.Status().evictions == 1);
  const Actions room = f.dispatcher.OnArenaClosed(closing[0]->arenas[0], f.clock.Now());
  CHECK(Only<CreateArenas>(room).size() == 1);
}

TEST_CASE("Dispatcher: what cannot fit is refused with both numbers", "[unit]") {
  ServerFixture f(1000);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  const Actions reserved = f.Reserve(job, 2000);
  REQUIRE(Refusal(reserved) != nullptr);
  CHECK(Refusal(reserved)->code == ErrorCode::kNoRoom);
  CHECK_THAT(Refusal(reserved)->message, Contains("2000 bytes") && Contains("1000 bytes"));
  CHECK(Only<CancelJob>(reserved).size() == 1);
}

TEST_CASE("Dispatcher: reservations are bounded, single and honest", "[unit]") {
  ServerFixture f(1000);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  ReserveRequest request;
  SECTION("none") {}
  SECTION("a charge above the size") { request.arenas = {{100, 101}}; }
  SECTION("a sum that wraps") {
    request.arenas = {{UINT64_MAX, UINT64_MAX}, {UINT64_MAX, UINT64_MAX}};
  }
  SECTION("more arenas than descriptors travel") { request.arenas.resize(254, {1, 1}); }
  SECTION("an arena that was not offered") {
    request.arenas = {{10, 10}};
    request.borrowed.emplace_back();
  }
  const Actions reserved = f.dispatcher.OnReserve(job, 1, request, f.clock.Now());
  CHECK(Refusal(reserved) != nullptr);
  CHECK(Only<CreateArenas>(reserved).empty());
  CHECK(Only<CancelJob>(reserved).size() == 1);
}

TEST_CASE("Dispatcher: two loads cannot be promised the same memory", "[unit]") {
  ServerFixture f(1000);
  const JobId one = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  const JobId two = f.StartedJob(f.Open(1, f.Request("/b"), f.Stat(2)));
  const Actions granted = f.Reserve(one, 700);
  CHECK(Only<CreateArenas>(granted).size() == 1);
  const Actions refused = f.Reserve(two, 700);  // the first one's arenas are not made yet
  REQUIRE(Refusal(refused) != nullptr);
  CHECK(Refusal(refused)->code == ErrorCode::kNoRoom);
}

TEST_CASE("Dispatcher: an invalid seal fails the load and frees the arenas", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  (void)f.Create(f.Reserve(job, 100));
  (void)f.dispatcher.OnCommit(job, 8, CommitRequest{});
  const Actions sealed =
      f.dispatcher.OnSealed(job, Error{ErrorCode::kCorrupt, "bad magic", 0}, f.clock.Now());
  REQUIRE(Refusal(sealed) != nullptr);
  CHECK(Refusal(sealed)->code == ErrorCode::kCorrupt);
  CHECK(Only<CloseArenas>(f.Exit(job)).size() == 1);
  CHECK(f.Status().entries == 0);
}

TEST_CASE("Dispatcher: pages beyond the promise need room of their own", "[unit]") {
  ServerFixture f(1000);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  std::vector<ArenaId> own;
  (void)f.Create(f.Reserve(job, 900), &own);
  (void)f.dispatcher.OnCommit(job, 8, CommitRequest{});
  SECTION("which there is") {
    CHECK(SentBody<OpenReply>(f.dispatcher.OnSealed(job, f.Sealed(own, 950), f.clock.Now())) !=
          nullptr);
  }
  SECTION("which there is not") {
    const Actions sealed = f.dispatcher.OnSealed(job, f.Sealed(own, 1100), f.clock.Now());
    REQUIRE(Refusal(sealed) != nullptr);
    CHECK_THAT(Refusal(sealed)->message, Contains("filled 1100") && Contains("reserved 900"));
  }
}

TEST_CASE("Dispatcher: equal storages are offered, borrowed and kept", "[unit]") {
  JobLimits limits;
  limits.collapse_from_bytes = UINT64_MAX;
  ServerFixture f(1U << 20U, limits);
  const std::uint64_t size = kMinSharedBytes;
  f.Resident("/a", f.Stat(1), size);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/b"), f.Stat(2)));
  CandidatesRequest ask;
  ask.storages = {{3, size, Digest{}}, {4, size + 1, Digest{}}};
  const Actions offered = f.dispatcher.OnCandidates(job, 6, ask);
  REQUIRE(Only<SendToLoader>(offered).size() == 1);
  const auto& reply = std::get<CandidatesReply>(Only<SendToLoader>(offered)[0]->body);
  REQUIRE(reply.candidates.size() == 1);
  CHECK(reply.candidates[0].storage == 3);
  CHECK(reply.candidates[0].offset_bytes == 64);
  const ArenaId shared = reply.arenas.at(0).id;

  std::vector<ArenaId> own;
  (void)f.Create(f.Reserve(job, 100, {shared}), &own);
  // The lender may go meanwhile: the job keeps the arena.
  const Actions evicted = f.dispatcher.OnEvict({SessionId{1}, 9}, {"/a"}, f.clock.Now());
  CHECK(Refusal(evicted) == nullptr);
  CHECK(Only<CloseArenas>(evicted).empty());
  (void)f.dispatcher.OnCommit(job, 8, CommitRequest{});
  const Actions sealed =
      f.dispatcher.OnSealed(job, f.Sealed(own, 50, {{shared, 64, size, Digest{}}}), f.clock.Now());
  const OpenReply* opened = SentBody<OpenReply>(sealed);
  REQUIRE(opened != nullptr);
  REQUIRE(opened->arenas.size() == 2);
  CHECK(opened->arenas[0].id == shared);  // borrowed first
  CHECK(Only<CloseArenas>(f.Exit(job)).empty());
  CHECK(f.Status().arena_bytes == size + 50);
}

TEST_CASE("Dispatcher: offers that are not taken are let go", "[unit]") {
  ServerFixture f(1U << 20U);
  f.Resident("/a", f.Stat(1), kMinSharedBytes);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/b"), f.Stat(2)));
  CandidatesRequest ask;
  ask.storages = {{0, kMinSharedBytes, Digest{}}};
  (void)f.dispatcher.OnCandidates(job, 6, ask);
  CHECK(Only<CloseArenas>(f.dispatcher.OnEvict({SessionId{1}, 9}, {"/a"}, f.clock.Now())).empty());
  CHECK(Only<CloseArenas>(f.Reserve(job, 100)).size() == 1);
}

TEST_CASE("Dispatcher: huge pages are asked for when no load runs, and give way", "[unit]") {
  JobLimits limits;
  limits.collapse_from_bytes = 100;
  ServerFixture f(1000, limits);
  const JobId load = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  CHECK(Only<StartJob>(f.Load(load, 200)).empty());
  const Actions exited = f.Exit(load);
  REQUIRE(Only<StartJob>(exited).size() == 1);
  CHECK(Only<StartJob>(exited)[0]->request.kind == JobKind::kCollapse);
  CHECK(Only<StartJob>(exited)[0]->request.arenas.size() == 1);
  const JobId collapse = f.StartedJob(exited);

  const Actions opened = f.Open(1, f.Request("/b"), f.Stat(2));
  REQUIRE(Only<CancelJob>(opened).size() == 1);
  CHECK(Only<CancelJob>(opened)[0]->job == collapse);
  const JobId second = f.StartedJob(opened);
  (void)f.dispatcher.OnLoaderExit(collapse, Error{ErrorCode::kLoaderFailed, "9", 0}, f.clock.Now());
  (void)f.Load(second, 10);
  const Actions resumed = f.Exit(second);
  REQUIRE(Only<StartJob>(resumed).size() == 1);
  CHECK(Only<StartJob>(resumed)[0]->request.kind == JobKind::kCollapse);
  const Actions done = f.Exit(f.StartedJob(resumed));
  CHECK(Only<MeasureArenas>(done).size() == 1);
  CHECK(Only<SendToClient>(done).empty());
}

TEST_CASE("Dispatcher: evicting a model ends its huge-page job and frees the memory", "[unit]") {
  JobLimits limits;
  limits.collapse_from_bytes = 100;
  ServerFixture f(1000, limits);
  const JobId load = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  (void)f.Load(load, 200);
  const JobId collapse = f.StartedJob(f.Exit(load));
  (void)f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now());

  const Actions evicted = f.dispatcher.OnEvict({SessionId{2}, 9}, {"/a"}, f.clock.Now());
  REQUIRE(Only<CancelJob>(evicted).size() == 1);
  CHECK(Only<CancelJob>(evicted)[0]->job == collapse);
  CHECK(Only<CloseArenas>(evicted).empty());
  const Actions ended =
      f.dispatcher.OnLoaderExit(collapse, Error{ErrorCode::kLoaderFailed, "9", 0}, f.clock.Now());
  REQUIRE(Only<CloseArenas>(ended).size() == 1);
  for (const ArenaId& arena : Only<CloseArenas>(ended)[0]->arenas) {
    (void)f.dispatcher.OnArenaClosed(arena, f.clock.Now());
  }
  CHECK(f.dispatcher.Status(f.clock.Now()).resident_bytes == 0);
}

TEST_CASE("Dispatcher: a load may have the room of a model that is getting huge pages", "[unit]") {
  JobLimits limits;
  limits.collapse_from_bytes = 100;
  ServerFixture f(1000, limits);
  const JobId load = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  (void)f.Load(load, 700);
  const JobId collapse = f.StartedJob(f.Exit(load));
  (void)f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now());

  const JobId second = f.StartedJob(f.Open(2, f.Request("/b"), f.Stat(2)));
  CHECK(Only<CreateArenas>(f.Reserve(second, 600)).empty());
  const Actions ended =
      f.dispatcher.OnLoaderExit(collapse, Error{ErrorCode::kLoaderFailed, "9", 0}, f.clock.Now());
  REQUIRE(Only<CloseArenas>(ended).size() == 1);
  const Actions room =
      f.dispatcher.OnArenaClosed(Only<CloseArenas>(ended)[0]->arenas.at(0), f.clock.Now());
  CHECK(Only<CreateArenas>(room).size() == 1);
}

TEST_CASE("Dispatcher: a reservation behind one that fails goes on", "[unit]") {
  ServerFixture f(1000);
  f.Resident("/old", f.Stat(1), 600);
  const JobId large = f.StartedJob(f.Open(1, f.Request("/large"), f.Stat(2)));
  const JobId small = f.StartedJob(f.Open(2, f.Request("/small"), f.Stat(3)));
  const auto closing = Only<CloseArenas>(f.Reserve(large, 900));
  REQUIRE(closing.size() == 1);
  CHECK(Only<CreateArenas>(f.Reserve(small, 100)).empty());  // in line behind the large one
  f.dispatcher.OnConnected();
  CHECK(Only<CancelJob>(f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now())).size() == 1);
  const Actions exited = f.Exit(large);
  REQUIRE(Only<CreateArenas>(exited).size() == 1);
  CHECK(Only<CreateArenas>(exited)[0]->job == small);
}

}  // namespace
}  // namespace modelcache
