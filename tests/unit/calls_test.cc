// Python calls: their checks, what is remembered of them, and how opens of them are answered.
#include "server/calls.h"

#include <set>

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

OpenRequest Call(std::uint8_t number) {
  OpenRequest request;
  request.call.emplace();
  request.call->key.bytes[0] = number;
  request.call->name = "f(" + std::to_string(number) + ")";
  request.call->arguments = {"/usr/bin/python3", "loader.py"};
  request.call->environment = {"HOME=/root"};
  request.call->folder = "/tmp";
  return request;
}

OpenRequest ByName(const OpenRequest& call) {
  OpenRequest request;
  request.model = CallPath(call.call->key);
  return request;
}

struct CallFixture : ServerFixture {
  using ServerFixture::ServerFixture;

  Actions Ask(std::uint64_t session, const OpenRequest& request, bool own_user = true) {
    std::vector<OpenedFile> files;
    if (request.call) {
      files.push_back({UniqueFd(), Stat(session)});
    }
    return dispatcher.OnOpen({SessionId{session}, 1, own_user}, request, std::move(files),
                             clock.Now());
  }

  // Makes the entry and keeps its lease; gives its id.
  ModelId Made(std::uint64_t session, const OpenRequest& request) {
    const JobId job = StartedJob(Ask(session, request));
    const Actions sealed = Load(job, 100);
    (void)Exit(job);
    const OpenReply* reply = SentBody<OpenReply>(sealed);
    return reply == nullptr ? ModelId{} : reply->model_id;
  }

  Actions Fail(JobId job, ErrorCode code, const std::string& detail = "") {
    Actions actions =
        dispatcher.OnLoaderFailed(job, Error{code, "why it failed", 0, detail}, clock.Now());
    (void)Exit(job);
    return actions;
  }
};

TEST_CASE("Calls: what may be started", "[unit]") {
  CHECK_FALSE(CheckCall(*Call(1).call));
  const auto problem = [](auto change) {
    CallRequest call = *Call(1).call;
    change(call);
    const auto error = CheckCall(call);
    return error ? error->message : std::string();
  };
  const std::string zero("a\0b", 3);
  CHECK_THAT(problem([](auto& c) { c.arguments.clear(); }), Contains("absolute"));
  CHECK_THAT(problem([](auto& c) { c.arguments[0] = "python3"; }), Contains("absolute"));
  CHECK_THAT(problem([&](auto& c) { c.arguments[0] = "/" + zero; }), Contains("absolute"));
  CHECK_THAT(problem([&](auto& c) { c.arguments[1] = zero; }), Contains("zero byte"));
  CHECK_THAT(problem([](auto& c) { c.arguments[1].assign((128U << 10U) + 1, 'x'); }),
             Contains("too long"));
  CHECK(problem([](auto& c) { c.arguments[1].assign(128U << 10U, 'x'); }).empty());
  CHECK_THAT(problem([](auto& c) { c.arguments.resize(257); }), Contains("257"));
  CHECK(problem([](auto& c) { c.arguments.resize(256); }).empty());
  CHECK_THAT(problem([](auto& c) { c.environment.assign(16385, "A=b"); }), Contains("16385"));
  CHECK_THAT(problem([](auto& c) { c.environment[0] = "HOME"; }), Contains("NAME=value"));
  CHECK_THAT(problem([](auto& c) { c.environment[0] = "=x"; }), Contains("NAME=value"));
  CHECK_THAT(problem([](auto& c) { c.folder = ""; }), Contains("folder"));
  CHECK_THAT(problem([](auto& c) { c.folder = "tmp"; }), Contains("folder"));
  CHECK_THAT(problem([](auto& c) { c.name.assign(4097, 'x'); }), Contains("name"));
  CHECK_THAT(problem([&](auto& c) { c.stale_reason = zero; }), Contains("stale"));
}

TEST_CASE("Calls: ids are never given twice, not even by the next daemon", "[unit]") {
  Digest other;
  other.bytes[15] = 1;
  std::set<ModelId> ids;
  for (const Digest& seed : {Digest{}, other}) {
    Calls calls(seed);
    for (std::uint8_t i = 0; i < 100; ++i) {
      ids.insert(calls.NewModel(CallKey{}));
      ids.insert(calls.NewModel(Call(7).call->key));
    }
  }
  CHECK(ids.size() == 400);
}

TEST_CASE("Calls: what cannot be cached is remembered, the oldest forgotten first", "[unit]") {
  Calls calls(Digest{});
  for (std::size_t i = 0; i <= kMaxUncacheable; ++i) {
    calls.Remember("call:" + std::to_string(i), "because of " + std::to_string(i));
  }
  CHECK(calls.Uncacheable("call:0") == nullptr);
  REQUIRE(calls.Uncacheable("call:1") != nullptr);
  CHECK(*calls.Uncacheable("call:1") == "because of 1");
  calls.Remember("call:1", std::string(100000, 'x'));
  CHECK(calls.Uncacheable("call:1")->size() == 4096);
  CHECK(calls.Uncacheable("call:2") != nullptr);
  CHECK(calls.Forget("call:1"));
  CHECK_FALSE(calls.Forget("call:1"));
  CHECK(calls.Uncacheable("call:1") == nullptr);
}

TEST_CASE("Dispatcher: a call starts its own loader and is a hit from then on", "[unit]") {
  CallFixture f;
  CHECK(Refusal(f.Ask(1, ByName(Call(1))))->code == ErrorCode::kNotFound);
  const Actions asked = f.Ask(1, Call(1));
  REQUIRE(Only<StartJob>(asked).size() == 1);
  const StartJob& start = *Only<StartJob>(asked)[0];
  REQUIRE(start.launch);
  CHECK(start.launch->arguments == Call(1).call->arguments);
  CHECK(start.launch->environment == Call(1).call->environment);
  CHECK(start.launch->folder == "/tmp");
  CHECK(start.files.size() == 1);
  REQUIRE(start.request.files.size() == 1);
  CHECK(start.request.files[0].path == CallPath(Call(1).call->key));
  CHECK(start.request.format == "python");
  const Actions sealed = f.Load(start.job, 100);
  REQUIRE(SentBody<OpenReply>(sealed) != nullptr);
  CHECK(SentBody<OpenReply>(sealed)->model_id == start.request.model_id);
  CHECK(SentBody<OpenReply>(sealed)->name == "f(1)");
  for (const OpenRequest& again : {Call(1), ByName(Call(1))}) {
    const Actions hit = f.Ask(2, again);
    REQUIRE(SentBody<OpenReply>(hit) != nullptr);
    CHECK(SentBody<OpenReply>(hit)->hit);
    CHECK(SentBody<OpenReply>(hit)->model_id == start.request.model_id);
  }
  CHECK(Only<StartJob>(f.Ask(2, Call(2))).size() == 1);
}

TEST_CASE("Dispatcher: askers of a call join its load", "[unit]") {
  CallFixture f;
  const JobId job = f.StartedJob(f.Ask(1, Call(1)));
  for (std::uint64_t session = 2; session < 10; ++session) {
    CHECK(f.Ask(session, Call(1)).empty());
  }
  CHECK(Only<SendToClient>(f.Load(job, 100)).size() == 9);
}

TEST_CASE("Dispatcher: a stale entry goes with its last lease", "[unit]") {
  CallFixture f;
  const ModelId old = f.Made(1, Call(1));
  OpenRequest again = Call(1);
  again.call->stale = old;
  again.call->stale_reason = "config.json changed";
  const Actions asked = f.Ask(2, again);
  REQUIRE(Only<StartJob>(asked).size() == 1);
  CHECK(f.dispatcher.catalog().Find(old) != nullptr);
  CHECK(f.dispatcher.catalog().Find(old)->superseded);
  CHECK(Refusal(f.Ask(3, ByName(Call(1))))->code == ErrorCode::kNotFound);
  const Actions sealed = f.Load(f.StartedJob(asked), 100);
  CHECK(SentBody<OpenReply>(sealed)->reason == "config.json changed");
  CHECK(SentBody<OpenReply>(sealed)->model_id != old);
  CHECK(Only<CloseArenas>(f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now())).size() == 1);
  CHECK(f.dispatcher.catalog().Find(old) == nullptr);
  CHECK(SentBody<OpenReply>(f.Ask(4, again))->hit);
}

TEST_CASE("Dispatcher: a stale entry without leases makes room at once", "[unit]") {
  CallFixture f;
  OpenRequest again = Call(1);
  again.call->stale = f.Made(1, Call(1));
  (void)f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now());
  const Actions asked = f.Ask(2, again);
  CHECK(Only<CloseArenas>(asked).size() == 1);
  CHECK(Only<StartJob>(asked).size() == 1);
}

TEST_CASE("Dispatcher: a call that cannot be cached is not tried again", "[unit]") {
  CallFixture f;
  const JobId job = f.StartedJob(f.Ask(1, Call(1)));
  CHECK(Refusal(f.Fail(job, ErrorCode::kUnsupported))->code == ErrorCode::kUnsupported);
  for (const OpenRequest& again : {Call(1), ByName(Call(1))}) {
    const Actions asked = f.Ask(2, again);
    CHECK(Only<StartJob>(asked).empty());
    REQUIRE(Refusal(asked) != nullptr);
    CHECK(Refusal(asked)->code == ErrorCode::kUnsupported);
    CHECK(Refusal(asked)->message == "why it failed");
  }
  const ModelRequest evict{CallPath(Call(1).call->key)};
  CHECK(Refusal(f.dispatcher.OnEvict({SessionId{2}, 1}, evict, f.clock.Now())) == nullptr);
  CHECK(Refusal(f.dispatcher.OnEvict({SessionId{2}, 1}, evict, f.clock.Now())) != nullptr);
  CHECK(Only<StartJob>(f.Ask(2, Call(1))).size() == 1);
}

TEST_CASE("Dispatcher: other failures of a call are not remembered, their detail not noted",
          "[unit]") {
  CallFixture f;
  const JobId job = f.StartedJob(f.Ask(1, Call(1)));
  (void)f.Ask(2, Call(1));
  const Actions failed = f.Fail(job, ErrorCode::kLoaderFailed, "c2VjcmV0");
  REQUIRE(Only<SendToClient>(failed).size() == 2);
  for (const SendToClient* send : Only<SendToClient>(failed)) {
    CHECK(std::get<ErrorReply>(send->body).detail == "c2VjcmV0");
  }
  for (const Note* note : Only<Note>(failed)) {
    CHECK(note->text.find("c2VjcmV0") == std::string::npos);
  }
  const Actions why = f.dispatcher.OnWhy({SessionId{1}, 2}, {"f(1)"}, f.clock.Now());
  REQUIRE(SentBody<WhyReply>(why) != nullptr);
  CHECK(SentBody<WhyReply>(why)->history.back().event == "failed");
  CHECK(SentBody<WhyReply>(why)->history.back().reason == "why it failed");
  const Actions asked = f.Ask(3, Call(1));
  CHECK(Only<StartJob>(asked).size() == 1);
  const Actions sealed = f.Load(f.StartedJob(asked), 100);
  CHECK_THAT(SentBody<OpenReply>(sealed)->reason, Contains("why it failed"));
}

TEST_CASE("Dispatcher: a loader of files that says unsupported is no call", "[unit]") {
  CallFixture f;
  const JobId job = f.StartedJob(f.Open(1, f.Request("call:m"), f.Stat(1)));
  (void)f.Fail(job, ErrorCode::kUnsupported);
  OpenRequest by_name;
  by_name.model = "call:m";
  CHECK(Refusal(f.Ask(1, by_name))->code == ErrorCode::kNotFound);
}

TEST_CASE("Dispatcher: calls of another user and odd opens are refused", "[unit]") {
  CallFixture f;
  CHECK(Refusal(f.Ask(1, Call(1), false))->code == ErrorCode::kPermission);
  OpenRequest both = Call(1);
  both.model = "m";
  CHECK(Refusal(f.Ask(1, both))->code == ErrorCode::kInvalidArgument);
  OpenRequest bad = Call(1);
  bad.call->folder = "relative";
  CHECK(Refusal(f.Ask(1, bad))->code == ErrorCode::kInvalidArgument);
  const Actions bare = f.dispatcher.OnOpen({SessionId{1}, 1, true}, Call(1), {}, f.clock.Now());
  CHECK(Refusal(bare)->code == ErrorCode::kInvalidArgument);
}

TEST_CASE("Dispatcher: a call nobody waits for any more is stopped", "[unit]") {
  CallFixture f;
  const JobId job = f.StartedJob(f.Ask(1, Call(1)));
  const Actions left = f.dispatcher.OnDisconnected(SessionId{1}, f.clock.Now());
  REQUIRE(Only<CancelJob>(left).size() == 1);
  CHECK(Only<CancelJob>(left)[0]->job == job);
  CHECK(Only<StartJob>(f.Ask(2, Call(1))).size() == 1);
}

}  // namespace
}  // namespace modelcache
