// Threads and forks over one client.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "client/control.h"
#include "tests/support/client_world.h"

using namespace modelcache;

namespace {

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

TEST_CASE("Core: a thread that waits for a load does not hold up the others", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  Frame open;
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
  ClientWorld world([](FakeSession& session, const Frame& request) {
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
  ClientWorld world;
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
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
  ClientWorld world([](FakeSession& session, const Frame& request) {
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
