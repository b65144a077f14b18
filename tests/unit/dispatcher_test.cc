// Requests, one by one: what is opened, asked and told.
#include "server/dispatcher.h"

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

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

}  // namespace
}  // namespace modelcache
