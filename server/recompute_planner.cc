// Least-recently-used eviction over models that share arenas.
#include "server/recompute_planner.h"

#include <algorithm>
#include <numeric>

namespace modelcache {
namespace {

std::vector<std::size_t> OldestFirst(const EvictionProblem& problem) {
  std::vector<std::size_t> order(problem.models.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const PlannedModel& left = problem.models[a];
    const PlannedModel& right = problem.models[b];
    return left.last_used != right.last_used ? left.last_used < right.last_used
                                             : left.id < right.id;
  });
  return order;
}

}  // namespace

std::uint64_t FreedBytes(const EvictionProblem& problem, const std::vector<std::size_t>& chosen) {
  std::vector<std::uint32_t> gone(problem.arenas.size(), 0);
  std::uint64_t freed = 0;
  for (std::size_t model : chosen) {
    for (std::size_t arena : problem.models[model].arenas) {
      if (++gone[arena] == problem.arenas[arena].users) {
        freed += problem.arenas[arena].cost_bytes;
      }
    }
  }
  return freed;
}

std::optional<EvictionPlan> LruPlanner::Plan(const EvictionProblem& problem) const {
  std::vector<std::size_t> chosen;
  for (std::size_t model : OldestFirst(problem)) {
    if (FreedBytes(problem, chosen) >= problem.need_bytes) {
      break;
    }
    chosen.push_back(model);
  }
  if (FreedBytes(problem, chosen) < problem.need_bytes) {
    return std::nullopt;
  }
  // Small old models may have been taken before a large one that suffices alone: keep the most
  // recently used of those that are not needed.
  for (std::size_t i = chosen.size(); i-- > 0;) {
    std::vector<std::size_t> fewer = chosen;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    if (FreedBytes(problem, fewer) >= problem.need_bytes) {
      chosen = std::move(fewer);
    }
  }
  EvictionPlan plan;
  plan.freed_bytes = FreedBytes(problem, chosen);
  plan.why = "least recently used, " + std::to_string(problem.need_bytes) + " bytes needed, " +
             std::to_string(plan.freed_bytes) + " freed";
  for (std::size_t model : chosen) {
    plan.models.push_back(problem.models[model].id);
  }
  return plan;
}

}  // namespace modelcache
