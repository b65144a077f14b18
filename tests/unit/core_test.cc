// The client against a daemon that answers as the test says, threads, forks and hang-ups included.
#include "client/core.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <latch>
#include <thread>

#include "client/control.h"
#include "proto/version.h"
#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/temp_dir.h"

using namespace modelcache;

namespace {

// A daemon with one model, and a file that stands for it.
struct World {
  explicit World(FakeDaemon::Handler other = nullptr, const BuildOptions& options = {})
      : built(BuildModel({Floats("w", 8, 1)}, options)),
        daemon(dir / "socket", [this, other](FakeSession& session, const Frame& request) {
          if (other) {
            other(session, request);
          } else if (request.header.type == MessageType::kOpen) {
            session.Reply(request, built.reply);
          } else {
            session.Fail(request, ErrorCode::kNotFound, "nothing of that name");
          }
        }) {}

  std::unique_ptr<Client> Connect() {
    Result<std::unique_ptr<Client>> client = Client::Connect(Options());
    REQUIRE(client.ok());
    return std::move(*client);
  }

  [[nodiscard]] ClientOptions Options() const {
    ClientOptions options;
    options.socket_path = dir / "socket";
    options.autostart = Autostart::kNever;
    options.timeout = std::chrono::seconds(5);
    return options;
  }

  TempDir dir;
  std::string file = dir.Write("m.safetensors", "content");
  BuiltModel built;
  FakeDaemon daemon;
};

float First(const Model& model) { return *static_cast<float*>(model.storage_data()[0]); }

// The error of opening against a daemon that answers an open with `answer`.
Error ErrorOfOpen(const FakeDaemon::Handler& answer) {
  World world(answer);
  Result<std::unique_ptr<Model>> model = world.Connect()->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  return std::move(model).error();
}

// Runs `body` in a forked child and returns its exit code.
template <typename Body>
int InChild(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(body());
  }
  int status = 0;
  (void)::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("Core: open maps the model and destroying it ends the lease", "[unit]") {
  World world;
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
  World world([&](FakeSession& session, const Frame& request) {
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
  World world([&](FakeSession& session, const Frame& request) {
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
  World world([&](FakeSession& session, const Frame& request) {
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
  World world(
      [&](FakeSession& session, const Frame& request) { session.Reply(request, built.reply); });
  const auto client = world.Connect();
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kCorrupt);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}

TEST_CASE("Core: too few descriptors are a protocol error", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  World world([&](FakeSession& session, const Frame& request) {
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

TEST_CASE("Core: a hang-up is answered by one new connection, then kUnavailable", "[unit]") {
  World world([](FakeSession& session, const Frame&) { session.HangUp(); });
  Result<std::unique_ptr<Model>> model = world.Connect()->Open({world.file}, {});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kUnavailable);
  CHECK(world.daemon.Connections() == 2);
}

TEST_CASE("Core: models stay readable when the daemon dies, and a new one is found", "[unit]") {
  auto world = std::make_unique<World>();
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
  World world;
  world.daemon.hello.version = kProtocolVersion + 1;
  const Error error = Client::Connect(world.Options()).error();
  CHECK(error.code == ErrorCode::kVersion);
  CHECK_THAT(error.message, Contains(std::to_string(kProtocolVersion + 1)));
}

TEST_CASE("Core: a daemon that never answers is given up at the deadline", "[unit]") {
  World world([](FakeSession&, const Frame&) {});
  OpenOptions options;
  options.timeout_ms = 1;  // and the grace for the daemon's own answer
  CHECK(world.Connect()->Open({world.file}, options).error().code == ErrorCode::kTimeout);
}

TEST_CASE("Core: an answer that comes after the caller gave up is released", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  Frame open;
  World world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      open.header = request.header;
      session.Event(request, MessageType::kProgress, ProgressEvent{1, 2});
    } else if (request.header.type == MessageType::kList) {
      session.Reply(open, built.reply);
      session.Reply(request, ListReply{});
    }
  });
  const auto client = world.Connect();
  OpenOptions options;
  options.progress = [](const ProgressEvent&) { return false; };
  CHECK(client->Open({world.file}, options).error().code == ErrorCode::kCancelled);
  CHECK(CallControl(*client, "list", "").ok());
  CHECK(CallControl(*client, "list", "").ok());
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}

TEST_CASE("Core: a caller that gives up withdraws its open from the daemon", "[unit]") {
  std::uint32_t opened = 0;
  std::uint32_t withdrawn = 0;
  std::uint8_t flags = 0;
  World world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      opened = request.header.request_id;
      session.Event(request, MessageType::kProgress, ProgressEvent{1, 2});
    } else if (request.header.type == MessageType::kCancel) {
      withdrawn = request.header.request_id;
      flags = request.header.flags;
    } else {
      session.Reply(request, ListReply{});
    }
  });
  const auto client = world.Connect();
  OpenOptions options;
  options.progress = [](const ProgressEvent&) { return false; };
  CHECK(client->Open({world.file}, options).error().code == ErrorCode::kCancelled);
  CHECK(world.daemon.WaitForFrames(MessageType::kCancel, 1));
  CHECK(CallControl(*client, "list", "").ok());  // answered after the handler saw the withdrawal
  CHECK(withdrawn == opened);
  CHECK(flags == kFlagEvent);
}

TEST_CASE("Core: an answer already here when the caller gives up is released, not withdrawn",
          "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  Frame open;
  World world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      open.header = request.header;
      session.Event(request, MessageType::kProgress, ProgressEvent{1, 2});
    } else if (request.header.type == MessageType::kList) {
      session.Reply(open, built.reply);
      session.Reply(request, ListReply{});
    }
  });
  const auto client = world.Connect();
  OpenOptions options;
  options.progress = [&](const ProgressEvent&) {
    // Another request reads the answer to the open for us.
    CHECK(CallControl(*client, "list", "").ok());
    return false;
  };
  CHECK(client->Open({world.file}, options).error().code == ErrorCode::kCancelled);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
  CHECK(CallControl(*client, "list", "").ok());
  CHECK(world.daemon.Frames(MessageType::kCancel) == 0);
}

TEST_CASE("Core: a refused open is not withdrawn", "[unit]") {
  World world([](FakeSession& session, const Frame& request) {
    session.Fail(request, ErrorCode::kBadFile, "x");
  });
  const auto client = world.Connect();
  CHECK(client->Open({world.file}, {}).error().code == ErrorCode::kBadFile);
  CHECK_FALSE(CallControl(*client, "list", "").ok());
  CHECK(world.daemon.Frames(MessageType::kCancel) == 0);
}

TEST_CASE("Core: progress reaches the opening thread in order", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  World world([&](FakeSession& session, const Frame& request) {
    for (std::uint64_t i = 1; i <= 3; ++i) {
      session.Event(request, MessageType::kProgress, ProgressEvent{i, 3});
    }
    session.Reply(request, built.reply);
  });
  std::vector<std::uint64_t> seen;
  OpenOptions options;
  options.progress = [&](const ProgressEvent& event) {
    seen.push_back(event.done_bytes);
    return true;
  };
  CHECK(world.Connect()->Open({world.file}, options).ok());
  CHECK(seen == std::vector<std::uint64_t>{1, 2, 3});
}

TEST_CASE("Core: a thread that waits for a load does not hold up the others", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  Frame open;
  World world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kOpen) {
      open.header = request.header;  // answered once the other thread was served
    } else {
      session.Reply(request, ListReply{});
      if (request.header.type == MessageType::kStatus) {
        session.Reply(open, built.reply);
      }
    }
  });
  const auto client = world.Connect();
  auto opened = std::async(std::launch::async, [&] { return client->Open({world.file}, {}).ok(); });
  REQUIRE(world.daemon.WaitForFrames(MessageType::kOpen, 1));
  CHECK(CallControl(*client, "list", "").ok());
  (void)CallControl(*client, "status", "");
  CHECK(opened.get());
}

TEST_CASE("Core: many threads share one connection and each gets its own answer", "[unit]") {
  World world([](FakeSession& session, const Frame& request) {
    session.Reply(request,
                  WhyReply{Decode<ModelRequest>(request.body).value().model, "absent", {}});
  });
  const auto client = world.Connect();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 100; ++i) {
        const std::string name = std::to_string(thread) + "-" + std::to_string(i);
        Result<WhyReply> reply = client->Control<WhyReply>(MessageType::kWhy, ModelRequest{name},
                                                           std::chrono::seconds(5));
        wrong += reply.ok() && reply->model == name ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
  CHECK(world.daemon.Connections() == 1);
}

TEST_CASE("Core: a forked child has its own connection and ends no lease of its parent (G12)",
          "[unit]") {
  World world;
  const auto client = world.Connect();
  Result<std::unique_ptr<Model>> model = client->Open({world.file}, {});
  REQUIRE(model.ok());
  const int code = InChild([&] {
    auto* value = static_cast<float*>((*model)->storage_data()[0]);
    *value += 1;
    const bool reopened = client->Open({world.file}, {}).ok();
    const bool readable = First(**model) == 2;
    model->reset();  // inherited: silent
    return reopened && readable ? 0 : 1;
  });
  CHECK(code == 0);
  CHECK(First(**model) == 1);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));  // of what the child opened itself
  CHECK(world.daemon.WaitForHangUps(1));
  CHECK(world.daemon.Connections() == 2);
  CHECK(world.daemon.Frames(MessageType::kRelease) == 1);
  model->reset();
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 2));
}

TEST_CASE("Core: a child forked while another thread waits in the library works", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  World world([&](FakeSession& session, const Frame& request) {
    if (request.header.type == MessageType::kList) {
      session.Reply(request, ListReply{});
    }
  });
  const auto client = world.Connect();
  OpenOptions options;
  options.timeout_ms = 1;
  auto waiting = std::async(std::launch::async,
                            [&] { return client->Open({world.file}, options).error().code; });
  REQUIRE(world.daemon.WaitForFrames(MessageType::kOpen, 1));
  CHECK(InChild([&] { return CallControl(*client, "list", "").ok() ? 0 : 1; }) == 0);
  CHECK(waiting.get() == ErrorCode::kTimeout);
}

TEST_CASE("Core: parent and child interleaved, each gets its own answers", "[unit]") {
  World world([](FakeSession& session, const Frame& request) {
    session.Reply(request,
                  WhyReply{Decode<ModelRequest>(request.body).value().model, "absent", {}});
  });
  const auto client = world.Connect();
  const auto ask = [&](const std::string& who) {
    for (int i = 0; i < 500; ++i) {
      const std::string name = who + std::to_string(i);
      Result<WhyReply> reply =
          client->Control<WhyReply>(MessageType::kWhy, ModelRequest{name}, std::chrono::seconds(5));
      if (!reply.ok() || reply->model != name) {
        return 1;
      }
    }
    return 0;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(ask("child"));
  }
  CHECK(ask("parent") == 0);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("Core: a model of 5,000 tensors needs few descriptors (G2)", "[unit]") {
  std::vector<BuiltTensor> tensors;
  for (int i = 0; i < 5000; ++i) {
    tensors.push_back(Floats("t" + std::to_string(i), 4, static_cast<float>(i)));
  }
  const BuiltModel built = BuildModel(tensors);
  World world(
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
  World world;
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
  World world([](FakeSession& session, const Frame& request) {
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

TEST_CASE("Core: MODELCACHE_LOAD_TIMEOUT is used when the caller says nothing", "[unit]") {
  std::uint64_t seen = 0;
  World world([&](FakeSession& session, const Frame& request) {
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
