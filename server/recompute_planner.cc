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

// What is freed so far, kept up to date by each model that goes or stays after all.
class Tally {
 public:
  explicit Tally(const EvictionProblem& problem)
      : problem_(problem), gone_(problem.arenas.size(), 0) {}

  void Take(std::size_t model) {
    for (std::size_t arena : problem_.models[model].arenas) {
      if (++gone_[arena] == problem_.arenas[arena].users) {
        freed_bytes_ += problem_.arenas[arena].cost_bytes;
      }
    }
  }

  void GiveBack(std::size_t model) {
    for (std::size_t arena : problem_.models[model].arenas) {
      if (gone_[arena]-- == problem_.arenas[arena].users) {
        freed_bytes_ -= problem_.arenas[arena].cost_bytes;
      }
    }
  }

  [[nodiscard]] std::uint64_t freed_bytes() const { return freed_bytes_; }
  [[nodiscard]] bool enough() const { return freed_bytes_ >= problem_.need_bytes; }

 private:
  const EvictionProblem& problem_;
  std::vector<std::uint32_t> gone_;
  std::uint64_t freed_bytes_ = 0;
};

}  // namespace

std::uint64_t FreedBytes(const EvictionProblem& problem, const std::vector<std::size_t>& chosen) {
  Tally tally(problem);
  for (std::size_t model : chosen) {
    tally.Take(model);
  }
  return tally.freed_bytes();
}

std::optional<EvictionPlan> LruPlanner::Plan(const EvictionProblem& problem) const {
  Tally tally(problem);
  std::vector<std::size_t> chosen;
  for (std::size_t model : OldestFirst(problem)) {
    if (tally.enough()) {
      break;
    }
    tally.Take(model);
    chosen.push_back(model);
  }
  if (!tally.enough()) {
    return std::nullopt;
  }
  // Small old models may have been taken before a large one that suffices alone: keep the most
  // recently used of those that are not needed.
  std::vector<std::size_t> needed;
  for (auto model = chosen.rbegin(); model != chosen.rend(); ++model) {
    tally.GiveBack(*model);
    if (!tally.enough()) {
      tally.Take(*model);
      needed.push_back(*model);
    }
  }
  std::reverse(needed.begin(), needed.end());
  EvictionPlan plan;
  plan.freed_bytes = tally.freed_bytes();
  plan.why = "least recently used, " + std::to_string(problem.need_bytes) + " bytes needed, " +
             std::to_string(plan.freed_bytes) + " freed";
  for (std::size_t model : needed) {
    plan.models.push_back(problem.models[model].id);
  }
  return plan;
}

}  // namespace modelcache
