// RecomputePlanner: least recently used, shared arenas, nothing more than needed.
#include "server/recompute_planner.h"

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

}  // namespace
}  // namespace modelcache
