// Those who wait for a load: their deadlines, limits and withdrawals.
#include "server/dispatcher.h"

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

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

// One waiter with a deadline of 100 ms, its load in the state of the section.
TEST_CASE("Dispatcher: no waiter outlives its deadline, whatever its load does", "[unit]") {
  JobLimits limits;
  limits.max_running = 1;
  ServerFixture f(1000, limits);
  OpenRequest hasty = f.Request("/m");
  hasty.timeout_ms = 100;
  std::vector<ArenaId> own;
  SECTION("it queues") {
    (void)f.Open(2, f.Request("/first"), f.Stat(2));
    (void)f.Open(1, hasty, f.Stat(1), 5);
  }
  SECTION("it reads") { (void)f.Open(1, hasty, f.Stat(1), 5); }
  SECTION("it waits for memory") {
    f.Resident("/old", f.Stat(9), 600);
    const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1), 5));
    REQUIRE(Only<CloseArenas>(f.Reserve(job, 700)).size() == 1);
  }
  SECTION("it fills") {
    const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1), 5));
    (void)f.Create(f.Reserve(job, 700));
  }
  SECTION("it is being sealed") {
    const JobId job = f.StartedJob(f.Open(1, hasty, f.Stat(1), 5));
    (void)f.Create(f.Reserve(job, 700), &own);
    (void)f.dispatcher.OnCommit(job, 8, CommitRequest{});
  }
  CHECK(f.dispatcher.NextDeadline() == f.clock.Now() + milliseconds(100));
  f.clock.Advance(milliseconds(100));
  const Actions late = f.dispatcher.OnTick(f.clock.Now());
  REQUIRE(Refusal(late) != nullptr);
  CHECK(Refusal(late)->code == ErrorCode::kTimeout);
  CHECK(Only<SendToClient>(late)[0]->request_id == 5);
  CHECK(f.dispatcher.OnTick(f.clock.Now()).empty());
}

TEST_CASE("Dispatcher: the number of a request that waits cannot be used again", "[unit]") {
  // Two waiters of one number would share a deadline, and one of them would never be told.
  ServerFixture f;
  OpenRequest hasty = f.Request("/m");
  hasty.timeout_ms = 100;
  (void)f.Open(1, hasty, f.Stat(1), 5);
  const Actions twice = f.Open(1, hasty, f.Stat(1), 5);
  REQUIRE(Refusal(twice) != nullptr);
  CHECK(Refusal(twice)->code == ErrorCode::kProtocol);
  f.clock.Advance(milliseconds(100));
  const Actions late = f.dispatcher.OnTick(f.clock.Now());
  CHECK(Only<SendToClient>(late).size() == 1);
  CHECK(Only<CancelJob>(late).size() == 1);
  CHECK(Refusal(f.Open(1, hasty, f.Stat(1), 5)) == nullptr);  // answered: free again
}

TEST_CASE("Dispatcher: a cancel that crosses the answer ends the lease", "[unit]") {
  ServerFixture f;
  SECTION("of a cold load") {
    (void)f.Load(f.StartedJob(f.Open(1, f.Request("/m"), f.Stat(1), 5)), 9);
  }
  SECTION("of a hit") {
    f.Resident("/m", f.Stat(1), 100);
    (void)f.Open(1, f.Request("/m"), f.Stat(1), 5);
  }
  REQUIRE(f.Status().leases == 1);
  (void)f.dispatcher.OnCancel({SessionId{2}, 5}, f.clock.Now());
  (void)f.dispatcher.OnCancel({SessionId{1}, 6}, f.clock.Now());
  CHECK(f.Status().leases == 1);
  (void)f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now());
  CHECK(f.Status().leases == 0);
  (void)f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now());  // once more
  CHECK(Refusal(f.dispatcher.OnEvict({SessionId{2}, 1}, {"/m"}, f.clock.Now())) == nullptr);
}

TEST_CASE("Dispatcher: a cancel spares the lease an earlier request of its number got", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  (void)f.Open(1, f.Request("/m"), f.Stat(1), 5);
  SECTION("the later one is refused") {
    OpenRequest odd = f.Request("/m");
    odd.format = "gguf";
    REQUIRE(Refusal(f.Open(1, odd, f.Stat(1), 5)) != nullptr);
  }
  SECTION("the later one waits") { (void)f.Open(1, f.Request("/n"), f.Stat(2), 5); }
  SECTION("the later one is a verify") {
    const Actions asked = f.dispatcher.OnVerify({SessionId{1}, 5}, {"/m"}, f.clock.Now());
    (void)f.dispatcher.OnVerified(f.StartedJob(asked), {}, f.clock.Now());
  }
  (void)f.dispatcher.OnCancel({SessionId{1}, 5}, f.clock.Now());
  CHECK(f.Status().leases == 1);
}

}  // namespace
}  // namespace modelcache
