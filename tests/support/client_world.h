// ClientWorld: a daemon with one model that answers as the test says, and a client of it.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "client/core.h"
#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/temp_dir.h"

namespace modelcache {

// A daemon with one model, and a file that stands for it.
struct ClientWorld {
  explicit ClientWorld(FakeDaemon::Handler other = nullptr, const BuildOptions& options = {})
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

// The first number of the first storage.
inline float First(const Model& model) { return *static_cast<float*>(model.storage_data()[0]); }

}  // namespace modelcache
