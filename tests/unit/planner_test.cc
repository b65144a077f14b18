// RecomputePlanner: least recently used, shared arenas, nothing more than needed.
#include "server/recompute_planner.h"

#include <numeric>
#include <random>
#include <set>

#include "tests/support/catch.h"

namespace modelcache {
namespace {

ModelId Id(std::uint8_t number) {
  ModelId id;
  id.bytes[0] = number;
  return id;
}

PlannedModel Used(std::uint8_t number, int seconds, std::vector<std::size_t> arenas) {
  PlannedModel model;
  model.id = Id(number);
  model.last_used = TimePoint(std::chrono::seconds(seconds));
  model.arenas = std::move(arenas);
  return model;
}

TEST_CASE("Planner: the least recently used goes first", "[unit]") {
  EvictionProblem problem;
  problem.need_bytes = 100;
  problem.arenas = {{100, 1}, {100, 1}, {100, 1}};
  problem.models = {Used(1, 30, {0}), Used(2, 10, {1}), Used(3, 20, {2})};
  const auto plan = LruPlanner().Plan(problem);
  REQUIRE(plan);
  CHECK(plan->models == std::vector<ModelId>{Id(2)});
  CHECK(plan->freed_bytes == 100);
}

TEST_CASE("Planner: a model whose eviction is not needed stays", "[unit]") {
  EvictionProblem problem;
  problem.need_bytes = 500;
  problem.arenas = {{10, 1}, {500, 1}};
  problem.models = {Used(1, 1, {0}), Used(2, 2, {1})};
  const auto plan = LruPlanner().Plan(problem);
  REQUIRE(plan);
  CHECK(plan->models == std::vector<ModelId>{Id(2)});
}

TEST_CASE("Planner: an arena is freed only when all its users go", "[unit]") {
  EvictionProblem problem;
  problem.need_bytes = 100;
  problem.arenas = {{100, 2}};
  problem.models = {Used(1, 1, {0}), Used(2, 2, {0})};
  const auto both = LruPlanner().Plan(problem);
  REQUIRE(both);
  CHECK(both->models == std::vector<ModelId>{Id(1), Id(2)});

  problem.arenas[0].users = 3;  // somebody who is no item needs it too
  CHECK_FALSE(LruPlanner().Plan(problem));
}

TEST_CASE("Planner: nothing to do needs no eviction, too much has no plan", "[unit]") {
  EvictionProblem problem;
  problem.arenas = {{100, 1}};
  problem.models = {Used(1, 1, {0})};
  const auto none = LruPlanner().Plan(problem);
  REQUIRE(none);
  CHECK(none->models.empty());
  problem.need_bytes = 101;
  CHECK_FALSE(LruPlanner().Plan(problem));
}

// Each step counted anew from FreedBytes: what the planner must agree with.
std::vector<ModelId> SlowPlan(const EvictionProblem& problem) {
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < problem.models.size(); ++i) {
    if (FreedBytes(problem, chosen) < problem.need_bytes) {
      chosen.push_back(i);
    }
  }
  for (std::size_t i = chosen.size(); i-- > 0;) {
    std::vector<std::size_t> fewer = chosen;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    if (FreedBytes(problem, fewer) >= problem.need_bytes) {
      chosen = std::move(fewer);
    }
  }
  std::vector<ModelId> ids;
  for (std::size_t i : chosen) {
    ids.push_back(problem.models[i].id);
  }
  return ids;
}

TEST_CASE("Planner: running counts agree with counting anew", "[unit]") {
  std::mt19937 random(7);
  const auto below = [&](std::uint32_t limit) { return random() % limit; };
  for (int round = 0; round < 300; ++round) {
    EvictionProblem problem;
    for (int i = 0; i < 12; ++i) {
      problem.arenas.push_back({below(100), 0});
    }
    std::uint64_t all = 0;
    for (std::uint8_t i = 0; i < 10; ++i) {
      std::set<std::size_t> arenas{below(12), below(12)};
      for (std::size_t arena : arenas) {
        ++problem.arenas[arena].users;
      }
      problem.models.push_back(Used(i, i, {arenas.begin(), arenas.end()}));
    }
    std::vector<std::size_t> every(problem.models.size());
    std::iota(every.begin(), every.end(), std::size_t{0});
    all = FreedBytes(problem, every);
    problem.need_bytes = below(static_cast<std::uint32_t>(all) + 1);
    const auto plan = LruPlanner().Plan(problem);
    REQUIRE(plan);
    CHECK(plan->models == SlowPlan(problem));
    CHECK(plan->freed_bytes >= problem.need_bytes);
    problem.need_bytes = all + 1;
    CHECK_FALSE(LruPlanner().Plan(problem));
  }
}

// Quadratic work here is more than any test's time.
TEST_CASE("Planner: a hundred thousand models are planned without counting each anew", "[unit]") {
  EvictionProblem problem;
  constexpr std::size_t kModels = 100'000;
  for (std::size_t i = 0; i < kModels; ++i) {
    problem.arenas.push_back({1, 1});
    problem.models.push_back(Used(1, static_cast<int>(i), {i}));
  }
  problem.need_bytes = kModels;
  const auto plan = LruPlanner().Plan(problem);
  REQUIRE(plan);
  CHECK(plan->models.size() == kModels);
}

}  // namespace
}  // namespace modelcache
