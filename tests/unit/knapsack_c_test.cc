// mc_knapsack_solve: every field, every refusal, answers as the solver gives them.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "client/include/modelcache/modelcache.h"
#include "tests/support/catch.h"

namespace {

struct Case {
  std::vector<double> weights;
  std::vector<double> values;
  double capacity = 0;

  [[nodiscard]] mc_knapsack Problem() const {
    mc_knapsack problem = {};
    problem.struct_size = sizeof problem;
    problem.count = values.size();
    problem.real_weights = weights.data();
    problem.values = values.data();
    problem.real_capacity = capacity;
    return problem;
  }
};

std::vector<std::uint8_t> Solve(const mc_knapsack& problem, mc_knapsack_result* result = nullptr) {
  std::vector<std::uint8_t> taken(problem.count, 7);
  const mc_status status = mc_knapsack_solve(&problem, taken.data(), result);
  INFO(mc_last_error());
  REQUIRE(status == MC_OK);
  return taken;
}

std::string Refused(const mc_knapsack& problem, mc_status expected = MC_INVALID_ARGUMENT) {
  std::vector<std::uint8_t> taken(3, 7);
  CHECK(mc_knapsack_solve(&problem, taken.data(), nullptr) == expected);
  CHECK(taken == std::vector<std::uint8_t>(3, 7));
  return mc_last_error();
}

using Taken = std::vector<std::uint8_t>;

TEST_CASE("Knapsack in C: fractions are exact as written, values keep small differences",
          "[unit]") {
  CHECK(Solve(Case{{0.3, 0.2, 0.1}, {3e12, 1, 1}, 0.6}.Problem()) == Taken{1, 1, 1});
  CHECK(Solve(Case{{0.1, 0.2}, {1, 1}, 0.3}.Problem()) == Taken{1, 1});
  CHECK(Solve(Case{{0.1, 1.0}, {2, 10}, 1.0}.Problem()) == Taken{0, 1});
  CHECK(Solve(Case{{0.0, 0.5}, {5, 1}, 0.4}.Problem()) == Taken{1, 0});
  CHECK(Solve(Case{{0.000001}, {5}, 0.0}.Problem()) == Taken{0});
  CHECK(Solve(Case{{}, {}, 1.0}.Problem()).empty());
  const Taken one = Solve(Case{{0.5, 0.5000005}, {1, 1}, 1.0}.Problem());
  CHECK(one[0] + one[1] == 1);
}

TEST_CASE("Knapsack in C: quanta round up, so that nothing is free", "[unit]") {
  mc_knapsack_result result = {};
  result.struct_size = sizeof result;
  const Case small{std::vector<double>(1000, 0.00004), std::vector<double>(1000, 1), 0.01};
  mc_knapsack problem = small.Problem();
  problem.quantum = 1e-4;
  Solve(problem, &result);
  CHECK(result.weight == 100);
  CHECK(result.capacity == 100);
  CHECK(result.units_per_one == 10000);
  CHECK(result.value == 100);
  problem.quantum = 0;
  Solve(problem, &result);
  CHECK(result.value == 250);
  CHECK(result.bound == 250);
  CHECK(result.end == MC_KNAPSACK_OPTIMAL);
}

TEST_CASE("Knapsack in C: whole weights, pins, methods and limits are passed on", "[unit]") {
  const std::vector<std::uint64_t> weights = {25, 5, 22, 26};
  const std::vector<double> values = {25, 2, 27, 28};
  mc_knapsack problem = {};
  problem.struct_size = sizeof problem;
  problem.count = 4;
  problem.weights = weights.data();
  problem.values = values.data();
  problem.capacity = 72;
  for (const std::uint32_t method : {MC_KNAPSACK_AUTO, MC_KNAPSACK_LIST, MC_KNAPSACK_DENSE}) {
    problem.method = method;
    problem.threads = method;
    CHECK(Solve(problem) == Taken{0, 1, 1, 1});
  }
  const std::vector<std::uint8_t> pins = {MC_KNAPSACK_IN, MC_KNAPSACK_FREE, MC_KNAPSACK_OUT,
                                          MC_KNAPSACK_FREE};
  problem.pins = pins.data();
  CHECK(Solve(problem) == Taken{1, 1, 0, 1});
  problem.pins = nullptr;
  problem.memory_limit_bytes = 100;
  CHECK_THAT(Refused(problem, MC_LIMIT), Contains("100 are allowed"));
  problem.method = 9;
  CHECK_THAT(Refused(problem), Contains("method"));
  problem.method = MC_KNAPSACK_LIST;
  problem.absolute_gap = 1000;
  mc_knapsack_result result = {};
  result.struct_size = sizeof result;
  Solve(problem, &result);
  CHECK(result.value <= result.bound);
}

TEST_CASE("Knapsack in C: bad numbers are refused by list and index", "[unit]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(Refused(Case{{1, nan, 1}, {1, 1, 1}, 1}.Problem()) == "weights[1] is NaN");
  CHECK(Refused(Case{{1, 1, -1}, {1, 1, 1}, 1}.Problem()) == "weights[2] is negative");
  CHECK(Refused(Case{{1, 1, 1}, {infinity, 1, 1}, 1}.Problem()) == "values[0] is infinite");
  CHECK(Refused(Case{{1, 1, 1}, {1, 1, 1}, nan}.Problem()) == "the capacity is NaN");
  const Case good{{1, 1, 1}, {1, 1, 1}, 1};
  mc_knapsack problem = good.Problem();
  problem.quantum = -1;
  CHECK_THAT(Refused(problem), Contains("quantum"));
  problem = good.Problem();
  problem.relative_gap = nan;
  CHECK_THAT(Refused(problem), Contains("gap"));
  problem.relative_gap = 2;
  CHECK_THAT(Refused(problem), Contains("gap"));
  problem = good.Problem();
  problem.real_weights = nullptr;
  CHECK_THAT(Refused(problem), Contains("real_weights"));
  problem = good.Problem();
  problem.struct_size = 0;
  CHECK_THAT(Refused(problem), Contains("struct_size"));
  problem.struct_size = sizeof problem;
  problem.count = ~std::uint64_t{0};
  CHECK_THAT(Refused(problem, MC_LIMIT), Contains("16,777,216"));
  CHECK(mc_knapsack_solve(nullptr, nullptr, nullptr) == MC_INVALID_ARGUMENT);
  problem = good.Problem();
  CHECK(mc_knapsack_solve(&problem, nullptr, nullptr) == MC_INVALID_ARGUMENT);
}

}  // namespace
