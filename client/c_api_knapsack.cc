// mc_knapsack_solve: doubles to integers, the solver, and back.
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "client/include/modelcache/modelcache.h"
#include "common/c_boundary.h"
#include "common/knapsack.h"
#include "common/knapsack_numbers.h"

using namespace modelcache;  // NOLINT(google-build-using-namespace): this file is the C side of it

static_assert(MC_KNAPSACK_DENSE == static_cast<int>(KnapsackMethod::kDense));
static_assert(MC_KNAPSACK_OUT == static_cast<int>(KnapsackPin::kOut));
static_assert(MC_KNAPSACK_LIMIT == static_cast<int>(KnapsackStatus::kLimit));
static_assert(sizeof(KnapsackPin) == sizeof(std::uint8_t));

namespace {

// A problem of the caller in integers. Weights given as integers are not copied.
struct Numbers {
  FixedPointValues values;
  UnitWeights units;
  std::span<const std::uint64_t> weights;
};

Result<Numbers> ToNumbers(const mc_knapsack& problem) {
  Numbers numbers;
  auto values = ToFixedPoint({problem.values, problem.count});
  if (!values.ok()) {
    return std::move(values).error();
  }
  numbers.values = std::move(*values);
  if (problem.weights != nullptr) {
    numbers.units.capacity = problem.capacity;
    numbers.weights = {problem.weights, problem.count};
    return numbers;
  }
  const std::span<const double> real(problem.real_weights, problem.count);
  auto units = problem.quantum > 0 ? ToQuanta(real, problem.real_capacity, problem.quantum)
                                   : ToExactUnits(real, problem.real_capacity);
  if (!units.ok()) {
    return std::move(units).error();
  }
  numbers.units = std::move(*units);
  numbers.weights = numbers.units.weights;  // a vector keeps its place when it is moved
  return numbers;
}

std::optional<const char*> Defect(const mc_knapsack& problem) {
  if (problem.count > kKnapsackCountLimit) {
    return std::nullopt;  // the solver says so; nothing is read before
  }
  if (problem.count > 0 && ((problem.weights == nullptr) == (problem.real_weights == nullptr) ||
                            problem.values == nullptr)) {
    return "values and one of weights and real_weights must be given";
  }
  if (!(problem.quantum >= 0) || std::isinf(problem.quantum)) {
    return "the quantum must be a number of 0 or more";
  }
  if (!(problem.absolute_gap >= 0) || std::isnan(problem.relative_gap)) {
    return "a gap must be a number of 0 or more";
  }
  return std::nullopt;
}

KnapsackOptions ToOptions(const mc_knapsack& problem, int shift) {
  KnapsackOptions options;
  options.method = static_cast<KnapsackMethod>(std::min<std::uint32_t>(problem.method, 0xFF));
  options.relative_gap = problem.relative_gap;
  const double gap = std::floor(std::ldexp(problem.absolute_gap, shift));
  options.absolute_gap = gap >= static_cast<double>(kKnapsackValueLimit)
                             ? kKnapsackValueLimit
                             : static_cast<std::int64_t>(gap);
  if (problem.memory_limit_bytes != 0) {
    options.memory_limit_bytes = problem.memory_limit_bytes;
  }
  if (problem.work_limit != 0) {
    options.work_limit = problem.work_limit;
  }
  options.threads = std::max<std::uint32_t>(problem.threads, 1);
  return options;
}

mc_knapsack_result Describe(const mc_knapsack& problem, const Numbers& numbers,
                            const KnapsackAnswer& answer) {
  mc_knapsack_result result = {};
  result.end = static_cast<std::uint32_t>(answer.status);
  long double value = 0;
  for (std::size_t i = 0; i < answer.taken.size(); ++i) {
    value += answer.taken[i] != 0 ? problem.values[i] : 0;
  }
  result.value = static_cast<double>(value);
  // Each value may have lost half a unit when it was rounded.
  const auto lost = static_cast<std::int64_t>(numbers.values.exact ? 0 : problem.count);
  result.bound = std::max(
      result.value, std::ldexp(static_cast<double>(answer.bound + lost), -numbers.values.shift));
  result.weight = answer.weight;
  result.capacity = numbers.units.capacity;
  result.units_per_one = numbers.units.units_per_one;
  result.work = answer.work;
  result.peak_states = answer.peak_states;
  return result;
}

mc_status Solve(const mc_knapsack& problem, std::uint8_t* taken, mc_knapsack_result* out) {
  if (const auto defect = Defect(problem)) {
    return FailArgument(*defect);
  }
  if (problem.count > kKnapsackCountLimit) {
    return Fail(Error{ErrorCode::kLimit, "more than 16,777,216 items", 0});
  }
  const Result<Numbers> numbers = ToNumbers(problem);
  if (!numbers.ok()) {
    return Fail(numbers.error());
  }
  KnapsackProblem integers;
  integers.weights = numbers->weights;
  integers.values = numbers->values.values;
  integers.capacity = numbers->units.capacity;
  if (problem.pins != nullptr) {
    integers.pins = {reinterpret_cast<const KnapsackPin*>(problem.pins), problem.count};
  }
  const auto answer = SolveKnapsack(integers, ToOptions(problem, numbers->values.shift));
  if (!answer.ok()) {
    return Fail(answer.error());
  }
  if (out != nullptr) {
    const mc_status status = CopyOut(Describe(problem, *numbers, *answer), out);
    if (status != MC_OK) {
      return status;
    }
  }
  std::copy(answer->taken.begin(), answer->taken.end(), taken);
  return MC_OK;
}

}  // namespace

mc_status mc_knapsack_solve(const mc_knapsack* problem, uint8_t* taken, mc_knapsack_result* out) {
  return Guarded([&] {
    mc_knapsack whole = {};
    if (problem == nullptr || !CopyIn(problem, whole)) {
      return FailArgument("a problem with its struct_size set must be given");
    }
    if (taken == nullptr && whole.count > 0) {
      return FailArgument("taken must have room for one byte per item");
    }
    return Solve(whole, taken, out);
  });
}
