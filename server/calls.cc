// Checks of calls, ids of their entries, and what cannot be cached.
#include "server/calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "common/digest.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxArguments = 256;
constexpr std::size_t kMaxVariables = 16384;
constexpr std::size_t kMaxTextBytes = 128U << 10U;  // what the kernel takes of one string
constexpr std::size_t kMaxPathBytes = 4096;         // PATH_MAX

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

bool IsText(const std::string& text, std::size_t most) {
  return text.size() <= most && text.find('\0') == std::string::npos;
}

bool IsAbsolute(const std::string& path) {
  return path.starts_with('/') && IsText(path, kMaxPathBytes);
}

bool IsVariable(const std::string& text) {
  const std::size_t equals = text.find('=');
  return IsText(text, kMaxTextBytes) && equals != std::string::npos && equals > 0;
}

}  // namespace

std::optional<Error> CheckCall(const CallRequest& call) {
  if (call.arguments.empty() || !IsAbsolute(call.arguments.front())) {
    return Invalid("the program of a call's loader is no absolute path");
  }
  if (call.arguments.size() > kMaxArguments || call.environment.size() > kMaxVariables) {
    return Error{ErrorCode::kLimit,
                 "a call with " + std::to_string(call.arguments.size()) + " arguments and " +
                     std::to_string(call.environment.size()) + " variables, limits " +
                     std::to_string(kMaxArguments) + " and " + std::to_string(kMaxVariables),
                 0};
  }
  for (const std::string& argument : call.arguments) {
    if (!IsText(argument, kMaxTextBytes)) {
      return Invalid("an argument of a call's loader is too long or contains a zero byte");
    }
  }
  if (!std::all_of(call.environment.begin(), call.environment.end(), IsVariable)) {
    return Invalid("a variable of a call's loader is not NAME=value");
  }
  if (!IsAbsolute(call.folder)) {
    return Invalid("the folder of a call's loader is no absolute path");
  }
  if (!IsText(call.name, kMaxPathBytes) || !IsText(call.stale_reason, kMaxPathBytes)) {
    return Invalid("the name of a call, or why it is stale, is too long or contains a zero byte");
  }
  return std::nullopt;
}

Error UncacheableError(const std::string& why) { return Error{ErrorCode::kUnsupported, why, 0}; }

ModelId Calls::NewModel(const CallKey& key) {
  ++made_;
  std::array<std::byte, sizeof seed_.bytes + sizeof key.bytes + sizeof made_> bytes{};
  std::memcpy(bytes.data(), seed_.bytes.data(), sizeof seed_.bytes);
  std::memcpy(bytes.data() + sizeof seed_.bytes, key.bytes.data(), sizeof key.bytes);
  std::memcpy(bytes.data() + sizeof seed_.bytes + sizeof key.bytes, &made_, sizeof made_);
  return ModelId{HashBytes(bytes).bytes};
}

void Calls::Remember(const std::string& path, const std::string& why) {
  (void)Forget(path);
  if (uncacheable_.size() >= kMaxUncacheable) {
    by_path_.erase(uncacheable_.back().first);
    uncacheable_.pop_back();
  }
  uncacheable_.emplace_front(path, why.substr(0, kMaxPathBytes));
  by_path_.emplace(uncacheable_.front().first, uncacheable_.begin());
}

const std::string* Calls::Uncacheable(std::string_view path) const {
  auto found = by_path_.find(path);
  return found == by_path_.end() ? nullptr : &found->second->second;
}

bool Calls::Forget(std::string_view path) {
  auto found = by_path_.find(path);
  if (found == by_path_.end()) {
    return false;
  }
  const auto entry = found->second;
  by_path_.erase(found);
  uncacheable_.erase(entry);
  return true;
}

}  // namespace modelcache
