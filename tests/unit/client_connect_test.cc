// The connection: found, lost, replaced; deadlines; versions that do not meet.
#include "client/control.h"
#include "proto/version.h"
#include "tests/support/client_world.h"

using namespace modelcache;

namespace {

constexpr auto kUnbearable = std::chrono::seconds(60);

}  // namespace

TEST_CASE("Core: a hang-up is answered by one new connection, then kUnavailable", "[unit]") {
  ClientWorld world([](FakeSession& session, const Frame&) { session.HangUp(); });
  Result<std::unique_ptr<Model>> model = world.Connect()->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kUnavailable);
  CHECK(world.daemon.Connections() == 2);
}

TEST_CASE("Core: models stay readable when the daemon dies, and a new one is found", "[unit]") {
  auto world = std::make_unique<ClientWorld>();
  const TempDir dir;
  const std::string file = dir.Write("m.safetensors", "x");
  const std::string path = dir / "socket";
  ClientOptions options = world->Options();
  options.socket_path = path;
  auto daemon = std::make_unique<FakeDaemon>(path, [&](FakeSession& session, const Frame& request) {
    session.Reply(request, world->built.reply);
  });
  Result<std::unique_ptr<Client>> client = Client::Connect(options);
  REQUIRE(client.ok());
  Result<std::unique_ptr<Model>> model = (*client)->Open({file}, {});
  REQUIRE(model.ok());
  daemon.reset();
  world->built.arenas.clear();
  CHECK(First(**model) == 1);
  CHECK((*client)->Open({file}, {}).error().code == ErrorCode::kUnavailable);
  const BuiltModel fresh = BuildModel({Floats("w", 8, 5)});
  daemon = std::make_unique<FakeDaemon>(path, [&](FakeSession& session, const Frame& request) {
    session.Reply(request, fresh.reply);
  });
  Result<std::unique_ptr<Model>> again = (*client)->Open({file}, {});
  REQUIRE(again.ok());
  CHECK(First(**again) == 5);
  model->reset();  // its connection is gone: no lease of another daemon may be released
  again->reset();
  CHECK(daemon->WaitForFrames(MessageType::kRelease, 1));
  CHECK(daemon->Frames(MessageType::kRelease) == 1);
}

TEST_CASE("Core: without a daemon and without autostart the answer is immediate", "[unit]") {
  const TempDir dir;
  ClientOptions options;
  options.socket_path = dir / "socket";
  options.autostart = Autostart::kNever;
  CHECK(Client::Connect(options).error().code == ErrorCode::kUnavailable);
}

TEST_CASE("Core: socket paths of 107 and 108 bytes (G7)", "[unit]") {
  const TempDir dir;
  ClientOptions options;
  options.autostart = Autostart::kNever;
  options.socket_path = dir / std::string(108 - dir.path().size() - 1, 's');
  const Error error = Client::Connect(options).error();
  CHECK(error.code == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.message, Contains("108") && Contains("107"));
  options.socket_path.pop_back();
  FakeDaemon daemon(options.socket_path, [](FakeSession&, const Frame&) {});
  CHECK(Client::Connect(options).ok());
}

TEST_CASE("Core: versions that do not meet", "[unit]") {
  ClientWorld world;
  world.daemon.hello.version = kProtocolVersion + 1;
  const Error error = Client::Connect(world.Options()).error();
  CHECK(error.code == ErrorCode::kVersion);
  CHECK_THAT(error.message, Contains(std::to_string(kProtocolVersion + 1)));
}

TEST_CASE("Core: a call that has to connect again keeps its own deadline", "[unit]") {
  ClientWorld world([](FakeSession& session, const Frame&) { session.HangUp(); });
  ClientOptions options = world.Options();
  options.timeout = kUnbearable;  // of the first connection, which is answered
  Result<std::unique_ptr<Client>> client = Client::Connect(options);
  REQUIRE(client.ok());
  world.daemon.mute = true;
  OpenOptions open;
  open.timeout_ms = 1;
  const TimePoint before = std::chrono::steady_clock::now();
  CHECK((*client)->Open({world.file}, open).error().code == ErrorCode::kTimeout);
  CHECK(CallControl(**client, "why", R"({"model": "m", "timeout_ms": 1})").error().code ==
        ErrorCode::kTimeout);
  CHECK(world.daemon.Frames(MessageType::kHello) == 3);
  CHECK(std::chrono::steady_clock::now() - before < kUnbearable / 2);
}

TEST_CASE("Core: descriptors that never come are given up at the deadline of the open", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      session.Reply(request, built.reply);
    }
  });
  world.daemon.hello.pid_namespace = 0;
  OpenOptions open;
  open.timeout_ms = 1;
  const TimePoint before = std::chrono::steady_clock::now();
  CHECK(world.Connect()->Open({world.file}, open).error().code == ErrorCode::kTimeout);
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(5));
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}

TEST_CASE("Core: the grace for the daemon's own answer is short", "[unit]") {
  CHECK(kReplyGrace <= std::chrono::milliseconds(250));
}

TEST_CASE("Core: a daemon that never answers is given up at the deadline", "[unit]") {
  ClientWorld world([](FakeSession&, const Frame&) {});
  OpenOptions options;
  options.timeout_ms = 1;  // and the grace for the daemon's own answer
  CHECK(world.Connect()->Open({world.file}, options).error().code == ErrorCode::kTimeout);
}
