// The table of control methods.
#include "client/control.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "client/model_files.h"
#include "proto/codec.h"

namespace modelcache {
namespace {

using std::chrono::milliseconds;

// What a caller may say in the argument.
struct Argument {
  std::string model;
  std::uint64_t timeout_ms = 0;  // 0: the method's own
};

template <typename Reply, typename Body>
Result<std::string> Forward(Client& client, MessageType type, const Body& body,
                            milliseconds timeout) {
  Result<Reply> reply = client.Control<Reply>(type, body, timeout);
  return reply.ok() ? Result<std::string>(Encode(*reply))
                    : Result<std::string>(std::move(reply).error());
}

template <MessageType type, typename Reply>
Result<std::string> Plain(Client& client, const Argument& argument) {
  return Forward<Reply>(client, type, EmptyReply{}, milliseconds(argument.timeout_ms));
}

template <MessageType type, typename Reply>
Result<std::string> OfModel(Client& client, const Argument& argument) {
  return AskForModel(argument.model, [&](const std::string& model) {
    return Forward<Reply>(client, type, ModelRequest{model, argument.timeout_ms},
                          milliseconds(argument.timeout_ms) + kReplyGrace);
  });
}

template <bool pinned>
Result<std::string> SetPin(Client& client, const Argument& argument) {
  return AskForModel(argument.model, [&](const std::string& model) {
    return Forward<EmptyReply>(client, MessageType::kPin, PinRequest{model, pinned},
                               milliseconds(argument.timeout_ms));
  });
}

struct Method {
  std::string_view name;
  bool needs_model;
  std::uint64_t timeout_ms;
  Result<std::string> (*run)(Client& client, const Argument& argument);
};

constexpr std::uint64_t kUsual = 10'000;
constexpr std::uint64_t kVerify = 3'600'000;  // reads every byte of the model twice

constexpr std::array<Method, 9> kMethods = {{
    {"list", false, kUsual, &Plain<MessageType::kList, ListReply>},
    {"status", false, kUsual, &Plain<MessageType::kStatus, StatusReply>},
    {"metrics", false, kUsual, &Plain<MessageType::kMetrics, MetricsReply>},
    {"shutdown", false, kUsual, &Plain<MessageType::kShutdown, EmptyReply>},
    {"why", true, kUsual, &OfModel<MessageType::kWhy, WhyReply>},
    {"evict", true, kUsual, &OfModel<MessageType::kEvict, EmptyReply>},
    {"verify", true, kVerify, &OfModel<MessageType::kVerify, VerifyReply>},
    {"pin", true, kUsual, &SetPin<true>},
    {"unpin", true, kUsual, &SetPin<false>},
}};

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

Result<Argument> ParseArgument(const Method& method, const std::string& text) {
  const auto json = nlohmann::json::parse(text.empty() ? "{}" : text, nullptr, false);
  if (!json.is_object()) {
    return Invalid("the argument of '" + std::string(method.name) + "' is not a JSON object");
  }
  Argument argument;
  argument.timeout_ms = method.timeout_ms;
  if (const auto timeout = json.find("timeout_ms"); timeout != json.end()) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 40U;
    if (!timeout->is_number_unsigned() || timeout->get<std::uint64_t>() > kMost) {
      return Invalid("\"timeout_ms\" is not a number of milliseconds");
    }
    argument.timeout_ms = timeout->get<std::uint64_t>();
  }
  const auto model = json.find("model");
  if (!method.needs_model) {
    return argument;
  }
  if (model == json.end() || !model->is_string() || model->get_ref<const std::string&>().empty()) {
    return Invalid("'" + std::string(method.name) + "' needs a \"model\": its name, id or path");
  }
  argument.model = model->get<std::string>();
  return argument;
}

}  // namespace

Result<std::string> CallControl(Client& client, const std::string& method,
                                const std::string& argument) {
  for (const Method& known : kMethods) {
    if (known.name == method) {
      Result<Argument> parsed = ParseArgument(known, argument);
      return parsed.ok() ? known.run(client, *parsed)
                         : Result<std::string>(std::move(parsed).error());
    }
  }
  return Invalid("unknown method '" + method + "'");
}

}  // namespace modelcache
