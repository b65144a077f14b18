// Instances and oracles for the knapsack tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "common/knapsack.h"
#include "tests/support/catch.h"

namespace modelcache {

struct Instance {
  std::vector<std::uint64_t> weights;
  std::vector<std::int64_t> values;
  std::uint64_t capacity = 0;
};

inline KnapsackProblem Problem(const Instance& instance) {
  return {instance.weights, instance.values, {}, instance.capacity};
}

// Solves, and checks what holds for every answer.
inline KnapsackAnswer Solved(const Instance& instance, const KnapsackOptions& options = {}) {
  auto result = SolveKnapsack(Problem(instance), options);
  if (!result.ok()) {
    FAIL(result.error().message);
  }
  KnapsackAnswer answer = std::move(*result);
  REQUIRE(answer.taken.size() == instance.weights.size());
  std::uint64_t weight = 0;
  std::int64_t value = 0;
  for (std::size_t i = 0; i < answer.taken.size(); ++i) {
    REQUIRE(answer.taken[i] <= 1);
    if (answer.taken[i] != 0) {
      weight += instance.weights[i];
      value += instance.values[i];
    }
  }
  REQUIRE(answer.weight == weight);
  REQUIRE(answer.value == value);
  REQUIRE(weight <= instance.capacity);
  REQUIRE(answer.bound >= answer.value);
  REQUIRE((answer.status == KnapsackStatus::kOptimal) == (answer.bound == answer.value));
  return answer;
}

// Best value for every capacity up to the instance's, one row.
inline std::vector<std::int64_t> Profile(const Instance& instance) {
  std::vector<std::int64_t> best(instance.capacity + 1, 0);
  for (std::size_t i = 0; i < instance.weights.size(); ++i) {
    for (std::uint64_t j = instance.capacity + 1; j-- > instance.weights[i];) {
      best[j] = std::max(best[j], best[j - instance.weights[i]] + instance.values[i]);
    }
  }
  return best;
}

inline std::int64_t Optimum(const Instance& instance) { return Profile(instance).back(); }

// The classes of the literature: names as in Pisinger's generator, and those of the planner.
inline const std::vector<std::string>& ClassNames() {
  static const std::vector<std::string> names = {
      "uncorrelated", "weakly",   "strongly", "inverse",       "almost",      "subset_sum",
      "even_subset",  "even_odd", "similar",  "span_uncorr",   "span_weakly", "span_strongly",
      "mstr",         "pceil",    "circle",   "equal_weights", "zero_weights"};
  return names;
}

Instance Generate(const std::string& name, std::size_t count, std::int64_t range,
                  std::mt19937_64& random);

// Classes of the planner: bytes and nanoseconds. "reload_linear", "reload_noisy", "reload_tiers",
// "flops".
Instance GeneratePlanner(const std::string& name, std::size_t count, std::mt19937_64& random);

// Sets the capacity to `part` of the sum, at least the heaviest item.
void SetCapacity(Instance& instance, double part);

}  // namespace modelcache
