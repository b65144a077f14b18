// Ownership of bytes that readers made themselves.
#include "server/loader/model_plan.h"

#include <utility>

namespace modelcache {

MemoryBytes OwnedBytes(std::string text) {
  auto owner = std::make_shared<const std::string>(std::move(text));
  return MemoryBytes{reinterpret_cast<const std::byte*>(owner->data()), owner};
}

}  // namespace modelcache
