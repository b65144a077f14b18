// Opening: what the daemon is told, what its answer becomes, and what is refused of it.
#include "client/core.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

#include "client/control.h"
#include "tests/support/client_world.h"

using namespace modelcache;

namespace {

// The error of opening against a daemon that answers an open with `answer`.
Error ErrorOfOpen(const FakeDaemon::Handler& answer) {
  ClientWorld world(answer);
  Result<std::unique_ptr<Model>> model = world.Connect()->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  return std::move(model).error();
}

}  // namespace

TEST_CASE("Core: open maps the model and destroying it ends the lease", "[unit]") {
  ClientWorld world;
  const auto client = world.Connect();
  {
    Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
    REQUIRE(model.ok());
    CHECK(First(**model) == 1);
    CHECK((*model)->reply().hit);
    CHECK(world.daemon.Frames(MessageType::kArenaDescriptors) == 0);
  }
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
  CHECK(world.daemon.Releases() == std::vector<std::uint64_t>{7});
}

TEST_CASE("Core: the daemon gets the files, their names and the options", "[unit]") {
  OpenRequest seen;
  std::size_t descriptors = 0;
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    seen = Decode<OpenRequest>(request.body).value();
    descriptors = request.descriptors.size();
    session.Reply(request, built.reply);
  });
  OpenOptions options;
  options.name = "shown";
  options.format = "safetensors";
  options.pin = true;
  options.timeout_ms = 1234;
  REQUIRE(world.Connect()->Open({world.file}, options).ok());
  CHECK(descriptors == 1);
  CHECK(seen.files.at(0).name == "m.safetensors");
  CHECK(seen.files.at(0).path == world.file);
  CHECK(seen.name == "shown");
  CHECK(seen.format == "safetensors");
  CHECK(seen.pin);
  CHECK(seen.timeout_ms == 1234);
}

TEST_CASE("Core: descriptors are fetched when the daemon lives in another PID namespace (G3)",
          "[unit]") {
  BuildOptions options;
  options.arena_max_bytes = 4U << 20U;
  const BuiltModel built = BuildModel({Floats("a", 900'000, 4), Floats("b", 900'000, 0)}, options);
  const bool with_reply = GENERATE(true, false);
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    std::vector<int> fds;
    if (request.header.type == MessageType::kOpen) {
      for (const UniqueFd& fd : built.arenas) {
        fds.push_back(fd.get());
      }
      OpenReply reply = built.reply;
      for (ArenaRef& arena : reply.arenas) {
        arena.fd = 0;  // what it is there says nothing here
      }
      session.Reply(request, reply,
                    with_reply ? std::span<const int>(fds) : std::span<const int>());
      return;
    }
    const auto wanted = Decode<ArenaDescriptorsRequest>(request.body).value();
    for (std::uint32_t i = 0; i < wanted.count; ++i) {
      fds.push_back(built.arenas.at(wanted.first + i).get());
    }
    session.Reply(request, EmptyReply{}, fds);
  });
  world.daemon.hello.pid_namespace += 1;
  world.daemon.hello.daemon_pid = 1;
  const auto client = world.Connect();
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
  REQUIRE(model.ok());
  CHECK(First(**model) == 4);
  CHECK((world.daemon.Frames(MessageType::kArenaDescriptors) == 0) == with_reply);
}

TEST_CASE("Core: descriptors are fetched when procfs does not work", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    const std::vector<int> fds = {built.arenas[0].get()};
    if (request.header.type == MessageType::kOpen) {
      session.Reply(request, built.reply);
    } else {
      session.Reply(request, EmptyReply{}, fds);
    }
  });
  world.daemon.hello.daemon_pid = 0x7FFFFFFF;  // nobody
  CHECK(world.Connect()->Open({world.file}, {}).ok());
  CHECK(world.daemon.Frames(MessageType::kArenaDescriptors) == 1);
}

TEST_CASE("Core: a lying reply is refused and its lease given back", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  built.reply.arenas[0].inode ^= 1;
  ClientWorld world(
      [&](FakeSession& session, const Frame& request) { session.Reply(request, built.reply); });
  const auto client = world.Connect();
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kCorrupt);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}

TEST_CASE("Core: too few descriptors are a protocol error", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      session.Reply(request, built.reply);
    } else {
      session.Reply(request, EmptyReply{});
    }
  });
  world.daemon.hello.pid_namespace = 0;
  Result<std::unique_ptr<Model>> model = world.Connect()->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kProtocol);
}

TEST_CASE("Core: frames that make no sense are errors", "[unit]") {
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame&) {
          session.SendBytes(std::string(64, '\xFF'));
        }).code == ErrorCode::kProtocol);
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame& request) {
          session.Send(request, kFlagReply, "not json", {});
        }).code == ErrorCode::kProtocol);
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame& request) {
          session.Send(request, kFlagReply, R"({"lease": -1})", {});
        }).code == ErrorCode::kProtocol);
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame& request) {
          session.Send(request, kFlagReply | kFlagError, "[]", {});
        }).code == ErrorCode::kProtocol);
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame& request) {
          session.Fail(request, ErrorCode::kOk, "");
        }).code == ErrorCode::kProtocol);
  CHECK(ErrorOfOpen([](FakeSession& session, const Frame& request) {
          Frame other;
          other.header = request.header;
          other.header.type = MessageType::kList;
          session.Send(other, kFlagReply, "{}", {});
        }).code == ErrorCode::kProtocol);
}

TEST_CASE("Core: the daemon's refusal reaches the caller with its message", "[unit]") {
  const Error error = ErrorOfOpen([](FakeSession& session, const Frame& request) {
    session.Fail(request, ErrorCode::kNoRoom, "needs 5, has 3");
  });
  CHECK(error.code == ErrorCode::kNoRoom);
  CHECK(error.message == "needs 5, has 3");
}

TEST_CASE("Core: a model of 5,000 tensors needs few descriptors (G2)", "[unit]") {
  std::vector<BuiltTensor> tensors;
  for (int i = 0; i < 5000; ++i) {
    tensors.push_back(Floats("t" + std::to_string(i), 4, static_cast<float>(i)));
  }
  const BuiltModel built = BuildModel(tensors);
  ClientWorld world(
      [&](FakeSession& session, const Frame& request) { session.Reply(request, built.reply); });
  const auto client = world.Connect();
  const int before = ::dup(0);
  (void)::close(before);
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
  REQUIRE(model.ok());
  const int after = ::dup(0);
  (void)::close(after);
  CHECK(after == before);
  CHECK(static_cast<float*>((*model)->storage_data()[4999])[0] == 4999);
}

TEST_CASE("Core: the descriptor limit is named and the connection survives it (G2)", "[unit]") {
  ClientWorld world;
  const auto client = world.Connect();
  rlimit limit = {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const int next = ::dup(0);
  (void)::close(next);
  // Room for the file, none for the arena.
  rlimit low = limit;
  low.rlim_cur = static_cast<rlim_t>(next) + 1;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  Result<std::unique_ptr<Model>> model = client->OpenResident("w");
  Result<std::unique_ptr<Model>> refused = client->Open({world.file}, {});
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK(model.ok());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kLimit);
  CHECK(client->Open({world.file}, {}).ok());
}

TEST_CASE("Core: control methods by name", "[unit]") {
  ClientWorld world([](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kStatus) {
      StatusReply status;
      status.entries = 3;
      session.Reply(request, status);
    } else if (request.header.type == MessageType::kPin) {
      const auto pin = Decode<PinRequest>(request.body).value();
      session.Fail(request, ErrorCode::kNotFound, pin.model + (pin.pinned ? " pin" : " unpin"));
    } else {
      session.Reply(request, EmptyReply{});
    }
  });
  const auto client = world.Connect();
  const auto status = CallControl(*client, "status", "{}");
  REQUIRE(status.ok());
  CHECK_THAT(*status, Contains("\"entries\":3"));
  CHECK(CallControl(*client, "pin", R"({"model": "m"})").error().message == "m pin");
  CHECK(CallControl(*client, "unpin", R"({"model": "/a//m"})").error().message == "/a/m unpin");
  CHECK(CallControl(*client, "evict", R"({"model": "m", "timeout_ms": 1000})").ok());
  CHECK(CallControl(*client, "shutdown", "").ok());
  for (const char* bad : {"", "{}", "[]", "x", R"({"model": 3})", R"({"model": ""})",
                          R"({"model": "m", "timeout_ms": -1})"}) {
    CHECK(CallControl(*client, "evict", bad).error().code == ErrorCode::kInvalidArgument);
  }
  CHECK(CallControl(*client, "nonsense", "").error().code == ErrorCode::kInvalidArgument);
}

TEST_CASE("Core: what no model is called is asked for as the path of a file", "[unit]") {
  std::vector<std::string> asked;
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    asked.push_back(request.header.type == MessageType::kOpen
                        ? Decode<OpenRequest>(request.body).value().model
                        : Decode<ModelRequest>(request.body).value().model);
    session.Fail(request, ErrorCode::kNotFound, "no " + asked.back());
  });
  const auto client = world.Connect();
  const std::string whole = AbsolutePath("gone.safetensors");
  const std::vector<std::string> both = {"gone.safetensors", whole};
  CHECK(client->OpenResident("gone.safetensors").error().message == "no gone.safetensors");
  CHECK(asked == both);
  asked.clear();
  CHECK_FALSE(CallControl(*client, "evict", R"({"model": "gone.safetensors"})").ok());
  CHECK(asked == both);
  asked.clear();
  CHECK_FALSE(CallControl(*client, "why", R"({"model": "./gone.safetensors"})").ok());
  CHECK(asked == std::vector{whole});
}

TEST_CASE("Core: a verify tells the daemon how long its caller waits", "[unit]") {
  std::uint64_t seen = 0;
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    seen = Decode<ModelRequest>(request.body).value().timeout_ms;
    session.Reply(request, VerifyReply{});
  });
  const auto client = world.Connect();
  CHECK(CallControl(*client, "verify", R"({"model": "m", "timeout_ms": 1234})").ok());
  CHECK(seen == 1234);
}

TEST_CASE("Core: another name than the one asked for is pointed out", "[unit]") {
  ClientWorld world;
  world.built.reply.name = "first";
  world.built.reply.reason = "resident";
  const auto client = world.Connect();
  OpenOptions options;
  options.name = "second";
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, options);
  REQUIRE(model.ok());
  CHECK((*model)->reply().name == "first");
  CHECK((*model)->reply().reason == "resident as 'first'; the name 'second' was not given to it");
  options.name = "first";
  CHECK((*client->Open({world.file}, options))->reply().reason == "resident");
}

TEST_CASE("Core: MODELCACHE_LOAD_TIMEOUT is used when the caller says nothing", "[unit]") {
  std::uint64_t seen = 0;
  ClientWorld world([&](FakeSession& session, const Frame& request) {
    seen = Decode<OpenRequest>(request.body).value().timeout_ms;
    session.Fail(request, ErrorCode::kTimeout, "later");
  });
  const auto client = world.Connect();
  REQUIRE(::setenv("MODELCACHE_LOAD_TIMEOUT", "1.5", 1) == 0);
  CHECK_FALSE(client->Open({world.file}, {}).ok());
  CHECK(seen == 1500);
  REQUIRE(::setenv("MODELCACHE_LOAD_TIMEOUT", "soon", 1) == 0);
  CHECK(client->Open({world.file}, {}).error().code == ErrorCode::kInvalidArgument);
  REQUIRE(::unsetenv("MODELCACHE_LOAD_TIMEOUT") == 0);
}
