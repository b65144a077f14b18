// One function per command of modelcachectl.
#include "client/ctl/commands.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "client/ctl/progress_bar.h"
#include "client/ctl/render.h"
#include "client/ctl/text.h"
#include "client/model_files.h"
#include "proto/codec.h"

namespace modelcache {
namespace {

constexpr auto kReplyTimeout = std::chrono::seconds(10);
constexpr auto kVerifyTimeout = std::chrono::hours(1);

// What a command leaves: text for standard output and an exit code.
struct Outcome {
  std::string text;
  int exit_code = kExitDone;
};

struct Context {
  Client& client;
  const CommandLine& line;
  bool colour = false;
};

void Print(const std::string& text) {
  (void)std::fwrite(text.data(), 1, text.size(), stdout);
  (void)std::fflush(stdout);
}

int Report(const CommandLine& line, const Error& error, int exit_code) {
  (void)std::fprintf(stderr, "modelcachectl: %s\n", Printable(error.message).c_str());
  if (line.json) {
    const nlohmann::json json = {
        {"error", {{"code", ErrorCodeName(error.code)}, {"message", error.message}}}};
    Print(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  return exit_code;
}

// Asks for the model as the user named it. A name without a slash may also be a file of the current
// folder, which the daemon knows by its whole path.
template <typename Ask>
auto AskForModel(const std::string& model, const Ask& ask) {
  auto answer = ask(ModelReference(model));
  if (!answer.ok() && answer.error().code == ErrorCode::kNotFound &&
      ::access(model.c_str(), F_OK) == 0) {
    return ask(AbsolutePath(model));
  }
  return answer;
}

// A request without argument, rendered by `render`.
template <typename Reply, typename Render>
Result<Outcome> Simple(const Context& context, MessageType type, const Render& render) {
  Result<Reply> reply = context.client.Control<Reply>(type, EmptyReply{}, kReplyTimeout);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return Outcome{context.line.json ? Encode(*reply) + "\n" : render(*reply)};
}

// A request about one model.
template <typename Reply>
Result<Reply> OfModel(const Context& context, MessageType type, Duration timeout) {
  return AskForModel(context.line.model, [&](const std::string& model) {
    return context.client.Control<Reply>(type, ModelRequest{model}, timeout);
  });
}

Outcome Done(const Context& context, const std::string& what) {
  return {context.line.json ? "{}\n" : what + " " + Printable(context.line.model) + "\n"};
}

Result<Outcome> Load(const Context& context) {
  ProgressBar bar;
  OpenOptions options;
  options.name = context.line.name;
  options.format = context.line.format;
  options.device = context.line.device;
  options.pin = context.line.pin;
  options.timeout_ms = static_cast<std::uint64_t>(context.line.timeout_seconds * 1000);
  options.progress = [&bar](const ProgressEvent& event) {
    bar.Show(event);
    return true;
  };
  Result<std::unique_ptr<Model>> model = context.client.Open(context.line.paths, options);
  if (!model.ok()) {
    return std::move(model).error();
  }
  return Outcome{context.line.json ? LoadedJson(**model) : RenderLoaded(**model)};
}

Result<Outcome> Show(const Context& context) {
  Result<std::unique_ptr<Model>> model = AskForModel(
      context.line.model,
      [&](const std::string& reference) { return context.client.OpenResident(reference); });
  if (!model.ok()) {
    return std::move(model).error();
  }
  return Outcome{context.line.json ? TensorsJson(**model) : RenderTensors(**model, context.colour)};
}

Result<Outcome> ListModels(const Context& context) {
  return Simple<ListReply>(context, MessageType::kList, [&](const ListReply& reply) {
    return RenderList(reply, context.colour);
  });
}

Result<Outcome> Status(const Context& context) {
  return Simple<StatusReply>(context, MessageType::kStatus, &RenderStatus);
}

Result<Outcome> Metrics(const Context& context) {
  return Simple<MetricsReply>(context, MessageType::kMetrics,
                              [](const MetricsReply& reply) { return reply.text; });
}

Result<Outcome> Shutdown(const Context& context) {
  return Simple<EmptyReply>(context, MessageType::kShutdown,
                            [](const EmptyReply&) { return "the daemon is shutting down\n"; });
}

Result<Outcome> Evict(const Context& context) {
  Result<EmptyReply> reply = OfModel<EmptyReply>(context, MessageType::kEvict, kReplyTimeout);
  return reply.ok() ? Result<Outcome>(Done(context, "evicted"))
                    : Result<Outcome>(std::move(reply).error());
}

Result<Outcome> SetPin(const Context& context) {
  const bool pinned = context.line.command == "pin";
  Result<EmptyReply> reply = AskForModel(context.line.model, [&](const std::string& model) {
    return context.client.Control<EmptyReply>(MessageType::kPin, PinRequest{model, pinned},
                                              kReplyTimeout);
  });
  return reply.ok() ? Result<Outcome>(Done(context, pinned ? "pinned" : "unpinned"))
                    : Result<Outcome>(std::move(reply).error());
}

Result<Outcome> Why(const Context& context) {
  Result<WhyReply> reply = OfModel<WhyReply>(context, MessageType::kWhy, kReplyTimeout);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return Outcome{context.line.json ? Encode(*reply) + "\n" : RenderWhy(*reply, context.colour)};
}

Result<Outcome> Verify(const Context& context) {
  Result<VerifyReply> reply = OfModel<VerifyReply>(context, MessageType::kVerify, kVerifyTimeout);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return Outcome{context.line.json ? Encode(*reply) + "\n" : RenderVerify(*reply),
                 reply->ok ? kExitDone : kExitRefused};
}

struct Command {
  std::string_view name;
  Result<Outcome> (*run)(const Context& context);
};

constexpr std::array<Command, 11> kCommands = {{
    {"load", &Load},
    {"list", &ListModels},
    {"show", &Show},
    {"status", &Status},
    {"evict", &Evict},
    {"pin", &SetPin},
    {"unpin", &SetPin},
    {"why", &Why},
    {"verify", &Verify},
    {"metrics", &Metrics},
    {"shutdown", &Shutdown},
}};

}  // namespace

int RunCommand(const CommandLine& line) {
  ClientOptions options;
  options.socket_path = line.socket_path;
  options.autostart = line.command == "load" ? Autostart::kDefault : Autostart::kNever;
  Result<std::unique_ptr<Client>> client = Client::Connect(std::move(options));
  if (!client.ok()) {
    const ErrorCode code = client.error().code;
    return Report(line, client.error(),
                  code == ErrorCode::kInvalidArgument ? kExitUsage
                  : code == ErrorCode::kUnavailable   ? kExitNoDaemon
                                                      : kExitRefused);
  }
  for (const Command& command : kCommands) {
    if (command.name != line.command) {
      continue;
    }
    Result<Outcome> outcome = command.run({**client, line, WantsColour()});
    if (!outcome.ok()) {
      return Report(line, outcome.error(),
                    outcome.error().code == ErrorCode::kUnavailable ? kExitNoDaemon : kExitRefused);
    }
    Print(outcome->text);
    return outcome->exit_code;
  }
  return kExitUsage;
}

}  // namespace modelcache
