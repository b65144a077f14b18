// Opens that are given up: withdrawn or released, never kept.
#include "client/control.h"
#include "tests/support/client_world.h"

using namespace modelcache;

TEST_CASE("Core: an answer that comes after the caller gave up is released", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  Frame open;
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
  ClientWorld world([](FakeSession& session, const Frame& request) {
    session.Fail(request, ErrorCode::kBadFile, "x");
  });
  const auto client = world.Connect();
  CHECK(client->Open({world.file}, {}).error().code == ErrorCode::kBadFile);
  CHECK_FALSE(CallControl(*client, "list", "").ok());
  CHECK(world.daemon.Frames(MessageType::kCancel) == 0);
}

TEST_CASE("Core: progress reaches the opening thread in order", "[unit]") {
  BuiltModel built = BuildModel({Floats("w", 8, 1)});
  ClientWorld world([&](FakeSession& session, const Frame& request) {
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
