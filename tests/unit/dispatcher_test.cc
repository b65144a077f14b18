// Dispatcher and jobs, action by action.
#include "server/dispatcher.h"

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const ErrorReply* Refusal(const Actions& actions) { return SentBody<ErrorReply>(actions); }

TEST_CASE("Dispatcher: a cold load goes from open to reply", "[unit]") {
  ServerFixture f;
  const Actions opened = f.Open(1, f.Request("/m"), f.Stat(1));
  REQUIRE(Only<StartJob>(opened).size() == 1);
  CHECK(Only<SendToClient>(opened).empty());
  const JobId job = f.StartedJob(opened);
  CHECK(f.Status().loading == 1);

  const Actions reserved = f.Reserve(job, 500);
  REQUIRE(Only<CreateArenas>(reserved).size() == 1);
  std::vector<ArenaId> own;
  const Actions created = f.Create(reserved, &own);
  CHECK(f.Status().reserved_bytes == 500);
  REQUIRE(Only<SendToLoader>(created).size() == 1);
  CHECK(Only<SendToLoader>(created)[0]->descriptors == own);
  CHECK(Only<SendToLoader>(created)[0]->request_id == 7);

  const Actions committed = f.dispatcher.OnCommit(job, 8, CommitRequest{});
  REQUIRE(Only<SealArenas>(committed).size() == 1);
  CHECK(Only<SealArenas>(committed)[0]->own == own);

  const Actions sealed = f.dispatcher.OnSealed(job, f.Sealed(own, 480), f.clock.Now());
  const OpenReply* reply = SentBody<OpenReply>(sealed);
  REQUIRE(reply != nullptr);
  CHECK_FALSE(reply->hit);
  CHECK(reply->reason == "never loaded");
  REQUIRE(reply->arenas.size() == 1);
  CHECK(reply->arenas[0].fd == 101);
  CHECK(Only<SendToLoader>(sealed).size() == 1);
  const StatusReply status = f.Status();
  CHECK(status.loads == 1);
  CHECK(status.resident_bytes == 480);
  CHECK(status.reserved_bytes == 0);
  CHECK(status.arena_bytes == 480);
  CHECK(status.leases == 1);
  CHECK(f.Exit(job).empty());
  CHECK(f.dispatcher.job_count() == 0);
}

TEST_CASE("Dispatcher: a second open is a hit without any loader", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const Actions opened = f.Open(2, f.Request("/another/spelling"), f.Stat(1));
  const OpenReply* reply = SentBody<OpenReply>(opened);
  REQUIRE(reply != nullptr);
  CHECK(reply->hit);
  CHECK(Only<StartJob>(opened).empty());
  CHECK(f.Status().hits == 1);
  CHECK(f.Status().misses == 1);
}

TEST_CASE("Dispatcher: many askers share one load and each gets a lease", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  for (std::uint64_t session = 2; session <= 20; ++session) {
    CHECK(f.Open(session, f.Request("/m"), f.Stat(1)).empty());
  }
  const Actions sealed = f.Load(job, 100);
  CHECK(Only<SendToClient>(sealed).size() == 20);
  CHECK(f.Status().leases == 20);
  CHECK(f.Status().loads == 1);
}

TEST_CASE("Dispatcher: different models load in parallel up to the cap", "[unit]") {
  JobLimits limits;
  limits.max_running = 2;
  ServerFixture f(1000, limits);
  const JobId first = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  CHECK(f.StartedJob(f.Open(1, f.Request("/b"), f.Stat(2))).value != 0);
  CHECK(f.StartedJob(f.Open(1, f.Request("/c"), f.Stat(3))).value == 0);  // queued
  const Actions exited =
      f.dispatcher.OnLoaderExit(first, Error{ErrorCode::kLoaderFailed, "x", 0}, f.clock.Now());
  CHECK(f.StartedJob(exited).value != 0);
}

TEST_CASE("Dispatcher: a loader that dies fails every waiter and leaves nothing", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1), 5));
  (void)f.Open(2, f.Request("/m"), f.Stat(1), 6);
  (void)f.Create(f.Reserve(job, 500));
  const Actions exited = f.dispatcher.OnLoaderExit(
      job, Error{ErrorCode::kLoaderFailed, "loader killed by signal 9", 0}, f.clock.Now());
  const auto sent = Only<SendToClient>(exited);
  REQUIRE(sent.size() == 2);
  CHECK(sent[0]->request_id == 5);
  CHECK(sent[1]->request_id == 6);
  REQUIRE(Refusal(exited) != nullptr);
  CHECK(Refusal(exited)->code == ErrorCode::kLoaderFailed);
  const auto closed = Only<CloseArenas>(exited);
  REQUIRE(closed.size() == 1);
  (void)f.dispatcher.OnArenaClosed(closed[0]->arenas[0], f.clock.Now());
  CHECK(f.Status().reserved_bytes == 0);
  CHECK(f.Status().resident_bytes == 0);
  CHECK(f.Status().loading == 0);
  CHECK(f.Status().failed_loads == 1);
  // Failures are not cached.
  CHECK(f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1))).value != 0);
}

TEST_CASE("Dispatcher: what a loader says about a file is not in the log", "[unit]") {
  const auto log_of = [](const Error& error) {
    ServerFixture f;
    const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
    const auto failed = f.dispatcher.OnLoaderFailed(job, error, f.clock.Now());
    const auto notes = Only<Note>(failed);
    REQUIRE(notes.size() == 1);
    return notes[0]->text;
  };
  for (const ErrorCode code : {ErrorCode::kBadFile, ErrorCode::kUnsupported, ErrorCode::kInternal,
                               ErrorCode::kLoaderFailed}) {
    const std::string text = log_of({code, "starts with 'secret'", 0});
    CHECK_THAT(text, Contains("/m") && Contains(std::string(ErrorCodeName(code))));
    CHECK_THAT(text, !Contains("secret"));
  }
  CHECK_THAT(
      log_of({ErrorCode::kLoaderFailed, "loader killed by signal 6 (Aborted); it printed: s", 0}),
      Contains("signal 6 (Aborted)") && !Contains("printed"));
  CHECK_THAT(log_of({ErrorCode::kFileChanged, "/m: changed", 0}), Contains("/m: changed"));
}

TEST_CASE("Dispatcher: a job failure is told at once and the process killed", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  const Actions failed = f.dispatcher.OnLoaderFailed(
      job, Error{ErrorCode::kBadFile, "needs 72, has 69", 0}, f.clock.Now());
  REQUIRE(Refusal(failed) != nullptr);
  CHECK(Refusal(failed)->code == ErrorCode::kBadFile);
  CHECK(Refusal(failed)->message == "needs 72, has 69");
  REQUIRE(Only<CancelJob>(failed).size() == 1);
  // A new open does not join the dying one.
  CHECK(f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1))).value != 0);
  CHECK(Only<SendToClient>(f.Exit(job)).empty());
}

TEST_CASE("Dispatcher: the last waiter's end cancels the load", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  (void)f.Open(2, f.Request("/m"), f.Stat(1));
  (void)f.Create(f.Reserve(job, 500));
  f.dispatcher.OnConnected();
  f.dispatcher.OnConnected();
  CHECK(Only<CancelJob>(f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now())).empty());
  const Actions last = f.dispatcher.OnDisconnected(SessionId{2}, f.clock.Now());
  REQUIRE(Only<CancelJob>(last).size() == 1);
  CHECK(Only<CancelJob>(last)[0]->job == job);
  CHECK(f.Status().loading == 0);
  CHECK(Only<CloseArenas>(f.Exit(job)).size() == 1);
  CHECK(f.dispatcher.job_count() == 0);
}

TEST_CASE("Dispatcher: a withdrawn open is forgotten while its session lives", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1), 5));
  (void)f.Open(1, f.Request("/m"), f.Stat(1), 6);
  (void)f.Open(2, f.Request("/m"), f.Stat(1), 5);
  CHECK(f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now()).empty());
  CHECK(f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now()).empty());  // once more
  CHECK(f.dispatcher.OnCancel({SessionId{2}, 5}, f.clock.Now()).empty());
  const Actions last = f.dispatcher.OnCancel({SessionId{1}, 6}, f.clock.Now());
  REQUIRE(Only<CancelJob>(last).size() == 1);
  CHECK(Only<CancelJob>(last)[0]->job == job);
  CHECK(Only<SendToClient>(last).empty());
  CHECK(f.Status().loading == 0);
}

TEST_CASE("Dispatcher: a withdrawn open gets no answer, the others do", "[unit]") {
  ServerFixture f;
  OpenRequest hasty = f.Request("/m");
  hasty.timeout_ms = 100;
  const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1), 5));
  (void)f.Open(2, f.Request("/m"), f.Stat(1), 9);
  CHECK(f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now()).empty());
  f.clock.Advance(milliseconds(200));
  CHECK(f.dispatcher.OnTick(f.clock.Now()).empty());
  const Actions sealed = f.Load(job, 100);
  REQUIRE(Only<SendToClient>(sealed).size() == 1);
  CHECK(Only<SendToClient>(sealed)[0]->request_id == 9);
  CHECK(f.Status().leases == 1);
}

TEST_CASE("Dispatcher: a session may wait for a bounded number of answers", "[unit]") {
  JobLimits limits;
  limits.max_waiting_per_session = 2;
  ServerFixture f(1000, limits);
  const ModelId resident = f.Resident("/r", f.Stat(9), 10);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1), 1));
  (void)f.Open(1, f.Request("/a"), f.Stat(1), 2);
  const Actions third = f.Open(1, f.Request("/b"), f.Stat(2), 3);
  REQUIRE(Refusal(third) != nullptr);
  CHECK(Refusal(third)->code == ErrorCode::kLimit);
  CHECK_THAT(Refusal(third)->message, Contains("2 requests") && Contains("limit 2"));
  const Actions verify = f.dispatcher.OnVerify({SessionId{1}, 4}, {resident.Hex()}, f.clock.Now());
  REQUIRE(Refusal(verify) != nullptr);
  CHECK(Refusal(verify)->code == ErrorCode::kLimit);
  CHECK(f.StartedJob(f.Open(2, f.Request("/b"), f.Stat(2))).value != 0);  // another session
  (void)f.Load(job, 100);
  CHECK(Refusal(f.Open(1, f.Request("/b"), f.Stat(2), 5)) == nullptr);
}

TEST_CASE("Dispatcher: every way a wait ends makes room for another", "[unit]") {
  JobLimits limits;
  limits.max_waiting_per_session = 1;
  ServerFixture f(1000, limits);
  OpenRequest hasty = f.Request("/a");
  hasty.timeout_ms = 100;
  const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1), 1));
  REQUIRE(Refusal(f.Open(1, f.Request("/b"), f.Stat(2), 2)) != nullptr);
  SECTION("its deadline") {
    f.clock.Advance(milliseconds(100));
    (void)f.dispatcher.OnTick(f.clock.Now());
  }
  SECTION("a failure") {
    (void)f.dispatcher.OnLoaderFailed(job, Error{ErrorCode::kBadFile, "x", 0}, f.clock.Now());
  }
  SECTION("its withdrawal") { (void)f.dispatcher.OnCancel({SessionId{1}, 1}, f.clock.Now()); }
  SECTION("its answer") { (void)f.Load(job, 10); }
  SECTION("the end of the session") {
    f.dispatcher.OnConnected();
    (void)f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now());
  }
  CHECK(Refusal(f.Open(1, f.Request("/b"), f.Stat(2), 3)) == nullptr);
}

TEST_CASE("Dispatcher: a session may hold a bounded number of leases", "[unit]") {
  JobLimits limits;
  limits.max_leases_per_session = 2;
  ServerFixture f(1000, limits);
  f.Resident("/m", f.Stat(1), 100);
  const Actions first = f.Open(1, f.Request("/m"), f.Stat(1), 1);
  REQUIRE(SentBody<OpenReply>(first) != nullptr);
  (void)f.Open(1, f.Request("/m"), f.Stat(1), 2);
  const Actions third = f.Open(1, f.Request("/m"), f.Stat(1), 3);
  REQUIRE(Refusal(third) != nullptr);
  CHECK(Refusal(third)->code == ErrorCode::kLimit);
  CHECK_THAT(Refusal(third)->message, Contains("2 leases") && Contains("limit 2"));
  CHECK(SentBody<OpenReply>(f.Open(2, f.Request("/m"), f.Stat(1), 1)) != nullptr);
  (void)f.dispatcher.OnRelease(SessionId{1}, {SentBody<OpenReply>(first)->lease}, f.clock.Now());
  CHECK(SentBody<OpenReply>(f.Open(1, f.Request("/m"), f.Stat(1), 4)) != nullptr);
}

TEST_CASE("Dispatcher: queued loads hold a bounded number of descriptors", "[unit]") {
  JobLimits limits;
  limits.max_running = 1;
  limits.max_queued_descriptors = 2;
  ServerFixture f(1000, limits);
  const JobId running = f.StartedJob(f.Open(1, f.Request("/a"), f.Stat(1)));
  CHECK(f.Open(2, f.Request("/b"), f.Stat(2)).size() == 1);  // a note: it queues
  CHECK(f.Open(3, f.Request("/c"), f.Stat(3)).size() == 1);
  const Actions fourth = f.Open(4, f.Request("/d"), f.Stat(4));
  REQUIRE(Refusal(fourth) != nullptr);
  CHECK(Refusal(fourth)->code == ErrorCode::kLimit);
  CHECK_THAT(Refusal(fourth)->message, Contains("3 descriptors") && Contains("together 2"));
  CHECK(f.Status().misses == 3);
  f.dispatcher.OnConnected();
  (void)f.dispatcher.OnDisconnected(SessionId{3}, f.clock.Now());  // leaves the queue
  CHECK(Refusal(f.Open(4, f.Request("/d"), f.Stat(4))) == nullptr);
  CHECK(Refusal(f.Open(5, f.Request("/e"), f.Stat(5))) != nullptr);
  (void)f.Load(running, 10);
  CHECK(f.StartedJob(f.Exit(running)).value != 0);  // the next one starts
  CHECK(Refusal(f.Open(5, f.Request("/e"), f.Stat(5))) == nullptr);
}

TEST_CASE("Dispatcher: two indexes in one folder both stay hits", "[unit]") {
  ServerFixture f;
  const auto open = [&](const std::string& index, std::uint64_t inode) {
    OpenRequest request;
    request.files = {{index, "/f/" + index}, {"1.safetensors", "/f/1.safetensors"}};
    std::vector<OpenedFile> files;
    files.push_back({UniqueFd(), f.Stat(inode)});
    files.push_back({UniqueFd(), f.Stat(inode + 1)});
    return f.dispatcher.OnOpen({SessionId{1}, 1}, request, std::move(files), f.clock.Now());
  };
  for (const auto& [index, inode] :
       {std::pair("model.safetensors.index.json", 10), std::pair("model.fp16.index.json", 20)}) {
    const JobId job = f.StartedJob(open(index, static_cast<std::uint64_t>(inode)));
    const Actions sealed = f.Load(job, 100);
    REQUIRE(SentBody<OpenReply>(sealed) != nullptr);
    CHECK(SentBody<OpenReply>(sealed)->reason == "never loaded");
    (void)f.Exit(job);
  }
  CHECK(SentBody<OpenReply>(open("model.safetensors.index.json", 10))->hit);
  CHECK(SentBody<OpenReply>(open("model.fp16.index.json", 20))->hit);
  CHECK(f.dispatcher.catalog().Resolve("/f/model.fp16.index.json").ok());
  CHECK(f.dispatcher.catalog().Resolve("/f").error().code == ErrorCode::kInvalidArgument);
}

TEST_CASE("Dispatcher: a pin outlives loads that fail", "[unit]") {
  ServerFixture f;
  const ModelId old = f.Resident("/m", f.Stat(1), 100);
  (void)f.dispatcher.OnPin({SessionId{1}, 1}, {old.Hex(), true}, f.clock.Now());
  const JobId failing = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(2)));
  CHECK(f.dispatcher.catalog().CarriesPin("/m"));
  (void)f.dispatcher.OnLoaderFailed(failing, Error{ErrorCode::kBadFile, "x", 0}, f.clock.Now());
  (void)f.Exit(failing);
  SECTION("and holds the next version that loads") {
    const ModelId next = f.Resident("/m", f.Stat(3), 100);
    CHECK(f.dispatcher.catalog().Find(next)->pinned);
    CHECK_FALSE(f.dispatcher.catalog().CarriesPin("/m"));
  }
  SECTION("and can be taken away meanwhile") {
    CHECK(Refusal(f.dispatcher.OnPin({SessionId{1}, 2}, {"/m", false}, f.clock.Now())) == nullptr);
    CHECK(Refusal(f.dispatcher.OnPin({SessionId{1}, 3}, {"/m", false}, f.clock.Now())) != nullptr);
    const ModelId next = f.Resident("/m", f.Stat(3), 100);
    CHECK_FALSE(f.dispatcher.catalog().Find(next)->pinned);
  }
}

TEST_CASE("Dispatcher: a verifier that does not exit is ended, and its askers have deadlines",
          "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const JobId job =
      f.StartedJob(f.dispatcher.OnVerify({SessionId{1}, 3}, {"/m", 100}, f.clock.Now()));
  SECTION("after its answer") {
    (void)f.dispatcher.OnVerified(job, {}, f.clock.Now());
    CHECK(f.dispatcher.NextDeadline() <= f.clock.Now() + seconds(10));
    f.clock.Advance(seconds(10));
    CHECK(Only<CancelJob>(f.dispatcher.OnTick(f.clock.Now())).size() == 1);
  }
  SECTION("before its answer") {
    f.clock.Advance(milliseconds(100));
    const Actions late = f.dispatcher.OnTick(f.clock.Now());
    REQUIRE(Refusal(late) != nullptr);
    CHECK(Refusal(late)->code == ErrorCode::kTimeout);
    CHECK_THAT(Refusal(late)->message, Contains("verification"));
    CHECK(Only<CancelJob>(late).size() == 1);
  }
}

TEST_CASE("Dispatcher: the history of a load says how much was read", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  std::vector<ArenaId> own;
  (void)f.Create(f.Reserve(job, 100), &own);
  (void)f.dispatcher.OnCommit(job, 8, CommitRequest{12345});
  (void)f.dispatcher.OnSealed(job, f.Sealed(own, 100), f.clock.Now());
  const Actions why = f.dispatcher.OnWhy({SessionId{1}, 7}, {"/m"}, f.clock.Now());
  REQUIRE(SentBody<WhyReply>(why) != nullptr);
  CHECK_THAT(SentBody<WhyReply>(why)->history.back().reason, Contains("12345 bytes read"));
}

TEST_CASE("Dispatcher: a waiter whose deadline passes is told, the others wait on", "[unit]") {
  ServerFixture f;
  OpenRequest hasty = f.Request("/m");
  hasty.timeout_ms = 100;
  const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1)));
  (void)f.Open(2, f.Request("/m"), f.Stat(1));
  CHECK(f.dispatcher.NextDeadline() == f.clock.Now() + milliseconds(100));
  f.clock.Advance(milliseconds(99));
  CHECK(f.dispatcher.OnTick(f.clock.Now()).empty());
  f.clock.Advance(milliseconds(1));
  const Actions late = f.dispatcher.OnTick(f.clock.Now());
  REQUIRE(Refusal(late) != nullptr);
  CHECK(Refusal(late)->code == ErrorCode::kTimeout);
  CHECK(Only<CancelJob>(late).empty());
  CHECK(Only<SendToClient>(f.Load(job, 10)).size() == 1);
}

TEST_CASE("Dispatcher: a load past its own deadline is killed", "[unit]") {
  JobLimits limits;
  limits.load_timeout = seconds(60);
  ServerFixture f(1000, limits);
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  f.clock.Advance(seconds(60));
  const Actions late = f.dispatcher.OnTick(f.clock.Now());
  REQUIRE(Only<CancelJob>(late).size() == 1);
  CHECK(Only<CancelJob>(late)[0]->job == job);
  REQUIRE(Refusal(late) != nullptr);
  CHECK(Refusal(late)->code == ErrorCode::kTimeout);
  CHECK(f.dispatcher.NextDeadline() == kNoDeadline);
}

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

TEST_CASE("Dispatcher: verify holds the arenas and passes the answer on", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const Actions asked = f.dispatcher.OnVerify({SessionId{1}, 3}, {"/m"}, f.clock.Now());
  REQUIRE(Only<StartJob>(asked).size() == 1);
  const JobId job = f.StartedJob(asked);
  CHECK(Only<StartJob>(asked)[0]->request.kind == JobKind::kVerify);
  CHECK(Only<StartJob>(asked)[0]->request.files.at(0).path == "/m");
  CHECK(Only<StartJob>(asked)[0]->files.empty());
  CHECK(Only<CloseArenas>(f.dispatcher.OnEvict({SessionId{1}, 9}, {"/m"}, f.clock.Now())).empty());
  VerifyReply verified;
  verified.ok = true;
  const Actions answered = f.dispatcher.OnVerified(job, verified, f.clock.Now());
  REQUIRE(SentBody<VerifyReply>(answered) != nullptr);
  CHECK(SentBody<VerifyReply>(answered)->ok);
  CHECK(Only<CloseArenas>(f.Exit(job)).size() == 1);
}

TEST_CASE("Dispatcher: progress goes to those who want it", "[unit]") {
  ServerFixture f;
  OpenRequest curious = f.Request("/m");
  curious.want_progress = true;
  const JobId job = f.StartedJob(f.Open(1, curious, f.Stat(1), 4));
  (void)f.Open(2, f.Request("/m"), f.Stat(1));
  const Actions told = f.dispatcher.OnLoaderProgress(job, {5, 10});
  REQUIRE(Only<SendToClient>(told).size() == 1);
  CHECK(Only<SendToClient>(told)[0]->session == SessionId{1});
  CHECK(Only<SendToClient>(told)[0]->request_id == 4);
  CHECK(Only<SendToClient>(told)[0]->flags == kFlagEvent);
  CHECK(SentBody<ProgressEvent>(told)->done_bytes == 5);
}

TEST_CASE("Dispatcher: evict names leases, pin keeps, why tells the story", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const Actions opened = f.Open(1, f.Request("/m"), f.Stat(1));
  const Actions held = f.dispatcher.OnEvict({SessionId{1}, 2}, {"/m"}, f.clock.Now());
  REQUIRE(Refusal(held) != nullptr);
  CHECK(Refusal(held)->code == ErrorCode::kInUse);
  CHECK_THAT(Refusal(held)->message, Contains("1 lease"));
  (void)f.dispatcher.OnRelease(SessionId{1}, {SentBody<OpenReply>(opened)->lease}, f.clock.Now());
  (void)f.dispatcher.OnPin({SessionId{1}, 3}, {"/m", true}, f.clock.Now());
  CHECK(Refusal(f.dispatcher.OnEvict({SessionId{1}, 4}, {"/m"}, f.clock.Now())) != nullptr);
  (void)f.dispatcher.OnPin({SessionId{1}, 5}, {"/m", false}, f.clock.Now());
  CHECK(Refusal(f.dispatcher.OnEvict({SessionId{1}, 6}, {"/m"}, f.clock.Now())) == nullptr);

  const Actions why = f.dispatcher.OnWhy({SessionId{1}, 7}, {"/m"}, f.clock.Now());
  const WhyReply* story = SentBody<WhyReply>(why);
  REQUIRE(story != nullptr);
  CHECK(story->state == "absent");
  std::vector<std::string> events;
  for (const HistoryEvent& event : story->history) {
    events.push_back(event.event);
  }
  CHECK(events == std::vector<std::string>{"miss", "load", "hit", "pin", "unpin", "evict"});
  CHECK(Refusal(f.dispatcher.OnWhy({SessionId{1}, 8}, {"/x"}, f.clock.Now()))->code ==
        ErrorCode::kNotFound);
}

TEST_CASE("Dispatcher: why knows a model by path, name and id after it is gone", "[unit]") {
  ServerFixture f;
  OpenRequest request = f.Request("/folder/m");
  request.name = "friendly";
  const JobId job = f.StartedJob(f.Open(1, request, f.Stat(1)));
  const Actions sealed = f.Load(job, 100);
  const OpenReply opened = *SentBody<OpenReply>(sealed);
  (void)f.Exit(job);
  (void)f.dispatcher.OnRelease(SessionId{1}, {opened.lease}, f.clock.Now());
  (void)f.dispatcher.OnEvict({SessionId{1}, 2}, {"friendly"}, f.clock.Now());
  for (const std::string& text :
       {std::string("/folder/m"), std::string("friendly"), opened.model_id.Hex()}) {
    const Actions why = f.dispatcher.OnWhy({SessionId{1}, 7}, {text}, f.clock.Now());
    REQUIRE(SentBody<WhyReply>(why) != nullptr);
    CHECK(SentBody<WhyReply>(why)->history.back().event == "evict");
  }
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

TEST_CASE("Dispatcher: opens that no daemon could accept are refused", "[unit]") {
  ServerFixture f;
  OpenRequest request = f.Request("/m");
  ErrorCode expected = ErrorCode::kInvalidArgument;
  std::size_t descriptors = 1;
  SECTION("neither files nor model") {
    request.files.clear();
    descriptors = 0;
  }
  SECTION("files and model") { request.model = "x"; }
  SECTION("fewer descriptors than files") { descriptors = 0; }
  SECTION("a zero byte in a path") { request.files[0].path = std::string("a\0b", 3); }
  SECTION("an endless name") { request.name.assign(5000, 'x'); }
  SECTION("an unknown format") {
    request.format = "gguf";
    expected = ErrorCode::kUnsupported;
  }
  SECTION("an unknown device") {
    request.device = "cuda:x";
    expected = ErrorCode::kUnsupported;
  }
  SECTION("a model that is not resident") {
    request.files.clear();
    descriptors = 0;
    request.model = "absent";
    expected = ErrorCode::kNotFound;
  }
  std::vector<OpenedFile> files(descriptors);
  const Actions opened =
      f.dispatcher.OnOpen({SessionId{1}, 1}, request, std::move(files), f.clock.Now());
  REQUIRE(Refusal(opened) != nullptr);
  CHECK(Refusal(opened)->code == expected);
  CHECK(f.dispatcher.job_count() == 0);
}

TEST_CASE("Dispatcher: descriptors of arenas go to the holder of the lease only", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  OpenRequest request = f.Request("/m");
  request.want_descriptors = true;
  const Actions opened = f.Open(1, request, f.Stat(1));
  CHECK(Only<SendToClient>(opened)[0]->descriptors.size() == 1);
  const std::uint64_t lease = SentBody<OpenReply>(opened)->lease;
  CHECK(Only<SendToClient>(f.dispatcher.OnArenaDescriptors({SessionId{1}, 2}, {lease, 0, 1}))[0]
            ->descriptors.size() == 1);
  CHECK(Refusal(f.dispatcher.OnArenaDescriptors({SessionId{2}, 2}, {lease, 0, 1}))->code ==
        ErrorCode::kNotFound);
  CHECK(Refusal(f.dispatcher.OnArenaDescriptors({SessionId{1}, 2}, {lease, 1, 1}))->code ==
        ErrorCode::kInvalidArgument);
  CHECK(Refusal(f.dispatcher.OnArenaDescriptors({SessionId{1}, 2}, {lease, UINT32_MAX, UINT32_MAX}))
            ->code == ErrorCode::kInvalidArgument);
}

TEST_CASE("Dispatcher: stopping refuses waiters, kills loaders and takes no more", "[unit]") {
  ServerFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1)));
  const Actions stopped = f.dispatcher.OnShutdown({SessionId{2}, 1}, f.clock.Now());
  CHECK(Only<StopDaemon>(stopped).size() == 1);
  CHECK(Only<CancelJob>(stopped)[0]->job == job);
  REQUIRE(Refusal(stopped) != nullptr);
  CHECK(Refusal(stopped)->code == ErrorCode::kUnavailable);
  CHECK(Refusal(f.Open(1, f.Request("/m"), f.Stat(1)))->code == ErrorCode::kUnavailable);
}

TEST_CASE("Dispatcher: metrics have a line for every figure", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const std::string text = f.dispatcher.MetricsText(f.clock.Now());
  CHECK_THAT(text, Contains("modelcache_resident_bytes 100\n"));
  CHECK_THAT(text, Contains("modelcache_misses_total{reason=\"never_loaded\"} 1\n"));
  CHECK_THAT(text, Contains("# TYPE modelcache_hits_total counter\n"));
  CHECK(text.back() == '\n');
}

}  // namespace
}  // namespace modelcache
