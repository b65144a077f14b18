// Calls: what the daemon knows of Python calls beside their entries in the catalog.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "common/error.h"
#include "common/ids.h"
#include "proto/messages.h"

namespace modelcache {

inline constexpr std::size_t kMaxUncacheable = 1024;  // calls; the oldest go first

// What is wrong with a call that a client names, kInvalidArgument or kLimit; nothing when it may be
// started.
std::optional<Error> CheckCall(const CallRequest& call);

// kUnsupported, with what was remembered.
Error UncacheableError(const std::string& why);

// Logic only, bounded, not synchronised.
class Calls {
 public:
  explicit Calls(const Digest& seed) : seed_(seed) {}

  // The id of an entry that is about to be made; never the same twice.
  ModelId NewModel(const CallKey& key);

  // The result of this call cannot be kept; asking again would only cost a load.
  void Remember(const std::string& path, const std::string& why);
  // Why not, or nullptr. Valid until the next call.
  [[nodiscard]] const std::string* Uncacheable(std::string_view path) const;
  // False when nothing was remembered.
  bool Forget(std::string_view path);

 private:
  using Entry = std::pair<std::string, std::string>;  // path, why

  Digest seed_;
  std::uint64_t made_ = 0;
  std::list<Entry> uncacheable_;  // newest first
  std::unordered_map<std::string_view, std::list<Entry>::iterator>
      by_path_;  // keys lie in the list
};

}  // namespace modelcache
