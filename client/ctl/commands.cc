// One function per command of modelcachectl.
#include "client/ctl/commands.h"

#include <algorithm>
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
  const ModelFiles& files;  // load
  TimePoint deadline;       // load
};

void Print(const std::string& text) {
  (void)std::fwrite(text.data(), 1, text.size(), stdout);
  (void)std::fflush(stdout);
}

// How to get what is missing; empty when there is nothing to say.
std::string Hint(const CommandLine& line, int exit_code) {
  if (exit_code != kExitNoDaemon) {
    return "";
  }
  const std::string where = line.socket_path.empty() ? "" : " --socket " + line.socket_path;
  return "modelcachectl: start one with 'modelcached" + Printable(where) + "'" +
         (line.command == "load" ? "" : "; 'modelcachectl load' starts one by itself") + "\n";
}

int Report(const CommandLine& line, const Error& error, int exit_code) {
  (void)std::fprintf(stderr, "modelcachectl: %s\n%s", Printable(error.message).c_str(),
                     Hint(line, exit_code).c_str());
  if (line.json) {
    const nlohmann::json json = {
        {"error", {{"code", ErrorCodeName(error.code)}, {"message", error.message}}}};
    Print(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  return exit_code;
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
    const auto patience = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
    return context.client.Control<Reply>(
        type, ModelRequest{model, static_cast<std::uint64_t>(patience.count())},
        timeout + kReplyGrace);
  });
}

Outcome Done(const Context& context, const std::string& what, const std::string& then) {
  return {context.line.json ? "{}\n"
                            : what + " " + Printable(context.line.model) + ": " + then + "\n"};
}

Result<Outcome> Load(const Context& context) {
  ProgressBar bar;
  OpenOptions options;
  options.name = context.line.name;
  options.format = context.line.format;
  options.device = context.line.device;
  options.pin = context.line.pin;
  if (context.line.timeout_seconds > 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        context.deadline - std::chrono::steady_clock::now());
    options.timeout_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 1));
  }
  options.progress = [&bar](const ProgressEvent& event) {
    bar.Show(event);
    return true;
  };
  Result<std::unique_ptr<Model>> model = context.client.Open(context.files, options);
  if (!model.ok()) {
    return std::move(model).error();
  }
  return Outcome{context.line.json ? LoadedJson(**model) : RenderLoaded(**model)};
}

Result<Outcome> Show(const Context& context) {
  OpenOptions options;
  options.count_hit = false;
  Result<std::unique_ptr<Model>> model = context.client.OpenResident(context.line.model, options);
  if (!model.ok()) {
    return std::move(model).error();
  }
  return Outcome{context.line.json ? TensorsJson(**model) : RenderTensors(**model, context.colour)};
}

Result<Outcome> ListModels(const Context& context) {
  return Simple<ListReply>(context, MessageType::kList, [&](const ListReply& reply) {
    return RenderList(reply, {context.colour, context.line.wide});
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
  return reply.ok() ? Result<Outcome>(Done(context, "evicted", "the next open loads it again"))
                    : Result<Outcome>(std::move(reply).error());
}

Result<Outcome> SetPin(const Context& context) {
  const bool pinned = context.line.command == "pin";
  Result<EmptyReply> reply = AskForModel(context.line.model, [&](const std::string& model) {
    return context.client.Control<EmptyReply>(MessageType::kPin, PinRequest{model, pinned},
                                              kReplyTimeout);
  });
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return pinned ? Done(context, "pinned", "it stays until 'modelcachectl unpin'")
                : Done(context, "unpinned", "it may be evicted when room is needed");
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

Result<std::unique_ptr<Client>> ConnectFor(const CommandLine& line, TimePoint deadline) {
  ClientOptions options;
  options.socket_path = line.socket_path;
  options.autostart = line.command == "load" ? Autostart::kDefault : Autostart::kNever;
  options.timeout = std::min(options.timeout, deadline - std::chrono::steady_clock::now());
  return Client::Connect(std::move(options));
}

int ExitCode(const Error& error) {
  return error.code == ErrorCode::kUnavailable ? kExitNoDaemon : kExitRefused;
}

}  // namespace

int RunCommand(const CommandLine& line) {
  const auto command = std::find_if(kCommands.begin(), kCommands.end(), [&](const Command& known) {
    return known.name == line.command;
  });
  if (command == kCommands.end()) {
    return kExitUsage;
  }
  const TimePoint deadline = line.timeout_seconds > 0
                                 ? DeadlineAfter(std::chrono::duration_cast<Duration>(
                                       std::chrono::duration<double>(line.timeout_seconds)))
                                 : kNoDeadline;
  // Before a daemon is started for them.
  Result<ModelFiles> files =
      line.paths.empty() ? Result<ModelFiles>(ModelFiles()) : OpenModelFiles(line.paths);
  if (!files.ok()) {
    return Report(line, files.error(), kExitRefused);
  }
  Result<std::unique_ptr<Client>> client = ConnectFor(line, deadline);
  if (!client.ok()) {
    const bool usage = client.error().code == ErrorCode::kInvalidArgument;
    return Report(line, client.error(), usage ? kExitUsage : ExitCode(client.error()));
  }
  Result<Outcome> outcome = command->run({**client, line, WantsColour(), *files, deadline});
  if (!outcome.ok()) {
    return Report(line, outcome.error(), ExitCode(outcome.error()));
  }
  Print(outcome->text);
  return outcome->exit_code;
}

}  // namespace modelcache
