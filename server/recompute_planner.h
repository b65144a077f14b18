// RecomputePlanner: which models go when memory is needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/ids.h"

namespace modelcache {

// An arena that evictions could free. It is freed when all its users are evicted.
struct PlannedArena {
  std::uint64_t cost_bytes = 0;
  std::uint32_t users = 0;  // all of them, also those that are no items (leased models, jobs)
};

// A model that may go: neither leased nor pinned.
struct PlannedModel {
  ModelId id;
  TimePoint last_used;
  double load_seconds = 0;  // what it would cost to make it again
  std::uint64_t hits = 0;
  std::vector<std::size_t> arenas;  // indices into EvictionProblem::arenas
};

struct EvictionProblem {
  std::uint64_t need_bytes = 0;
  std::vector<PlannedModel> models;
  std::vector<PlannedArena> arenas;
};

struct EvictionPlan {
  std::vector<ModelId> models;    // in the order in which they should go
  std::uint64_t freed_bytes = 0;  // at least the need
  std::string why;                // for people: "least recently used, …"
};

// Pure: no clock, no state that a call could change. Any thread.
class RecomputePlanner {
 public:
  virtual ~RecomputePlanner() = default;

  // Nothing when even evicting every model frees less than needed.
  [[nodiscard]] virtual std::optional<EvictionPlan> Plan(const EvictionProblem& problem) const = 0;
};

// Least recently used first; a model whose eviction turns out not to be needed stays.
class LruPlanner final : public RecomputePlanner {
 public:
  [[nodiscard]] std::optional<EvictionPlan> Plan(const EvictionProblem& problem) const override;
};

// Bytes freed when the models at `chosen` (indices) are evicted together.
std::uint64_t FreedBytes(const EvictionProblem& problem, const std::vector<std::size_t>& chosen);

}  // namespace modelcache
