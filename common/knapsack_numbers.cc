// Scaling, rounding outwards, and what counts as a whole number.
#include "common/knapsack_numbers.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "common/knapsack.h"

namespace modelcache {
namespace {

constexpr double kWhole = 0x1p-50;  // relative distance within which a number counts as whole
constexpr int kWeightBits = 56;
constexpr int kValueBits = 60;

std::optional<std::string> Defect(double number) {
  if (std::isnan(number)) {
    return "is NaN";
  }
  if (std::isinf(number)) {
    return "is infinite";
  }
  if (number < 0) {
    return "is negative";
  }
  return std::nullopt;
}

std::optional<Error> CheckList(std::span<const double> numbers, const char* list) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (!(numbers[i] >= 0) || std::isinf(numbers[i])) {
      return Error{ErrorCode::kInvalidArgument,
                   std::string(list) + "[" + std::to_string(i) + "] " + *Defect(numbers[i]), 0};
    }
  }
  return std::nullopt;
}

std::optional<Error> CheckWeights(std::span<const double> weights, double capacity) {
  if (const auto defect = Defect(capacity)) {
    return Error{ErrorCode::kInvalidArgument, "the capacity " + *defect, 0};
  }
  return CheckList(weights, "weights");
}

// The exponent by which numbers are scaled so that `count` of them, with this sum and largest one,
// stay below 2^bits. The sum may have overflowed to infinity.
int ShiftFor(double sum, double largest, std::size_t count, int bits) {
  if (largest == 0) {
    return 0;
  }
  if (std::isinf(sum)) {
    return bits - 2 - std::ilogb(largest) - std::ilogb(static_cast<double>(count));
  }
  return bits - 1 - std::ilogb(sum);
}

bool IsWhole(double number) {
  return std::fabs(number - std::nearbyint(number)) <= kWhole * number;
}

double Up(double number) { return IsWhole(number) ? std::nearbyint(number) : std::ceil(number); }

double Down(double number) { return IsWhole(number) ? std::nearbyint(number) : std::floor(number); }

std::uint64_t ToUnits(double whole) {
  return whole >= static_cast<double>(kKnapsackWeightLimit) ? kKnapsackWeightLimit
                                                            : static_cast<std::uint64_t>(whole);
}

UnitWeights Scaled(std::span<const double> weights, double capacity, double units_per_one) {
  UnitWeights scaled;
  scaled.units_per_one = units_per_one;
  scaled.capacity = ToUnits(Down(capacity * units_per_one));
  scaled.weights.reserve(weights.size());
  for (const double weight : weights) {
    scaled.weights.push_back(ToUnits(Up(weight * units_per_one)));
  }
  return scaled;
}

bool OnGrid(std::span<const double> weights, double units_per_one) {
  return std::all_of(weights.begin(), weights.end(),
                     [units_per_one](double weight) { return IsWhole(weight * units_per_one); });
}

}  // namespace

Result<FixedPointValues> ToFixedPoint(std::span<const double> values) {
  if (auto failure = CheckList(values, "values")) {
    return *failure;
  }
  double sum = 0;
  double largest = 0;
  for (const double value : values) {
    sum += value;
    largest = std::max(largest, value);
  }
  FixedPointValues fixed;
  fixed.shift = ShiftFor(sum, largest, values.size(), kValueBits);
  fixed.values.reserve(values.size());
  for (const double value : values) {
    const double scaled = std::ldexp(value, fixed.shift);
    const double whole = std::nearbyint(scaled);
    fixed.exact = fixed.exact && whole == scaled && std::ldexp(whole, -fixed.shift) == value;
    fixed.values.push_back(static_cast<std::int64_t>(whole));
  }
  return fixed;
}

Result<UnitWeights> ToExactUnits(std::span<const double> weights, double capacity) {
  if (auto failure = CheckWeights(weights, capacity)) {
    return *failure;
  }
  double sum = 0;
  double largest = 0;
  std::size_t fitting = 0;
  for (const double weight : weights) {
    if (weight <= capacity) {
      sum += weight;
      largest = std::max(largest, weight);
      ++fitting;
    }
  }
  for (const double units_per_one : {1e4, 1e9}) {
    const double most = std::max(sum, std::min(capacity, sum)) * units_per_one;
    if (most < std::ldexp(1.0, kWeightBits) && OnGrid(weights, units_per_one)) {
      return Scaled(weights, capacity, units_per_one);
    }
  }
  const int shift = ShiftFor(sum, largest, fitting, kWeightBits);
  UnitWeights units;
  units.units_per_one = std::ldexp(1.0, std::clamp(shift, -1000, 1000));
  units.capacity = ToUnits(std::floor(std::ldexp(capacity, shift)));
  units.weights.reserve(weights.size());
  for (const double weight : weights) {
    // What fits alone must fit in units; with anything else beside it, it is over by a unit.
    const std::uint64_t rounded = ToUnits(std::ceil(std::ldexp(weight, shift)));
    units.weights.push_back(weight <= capacity ? std::min(rounded, units.capacity)
                                               : std::max(rounded, units.capacity + 1));
  }
  return units;
}

Result<UnitWeights> ToQuanta(std::span<const double> weights, double capacity, double quantum) {
  if (auto failure = CheckWeights(weights, capacity)) {
    return *failure;
  }
  // 1 / 1e-4 is exactly 10,000: the product below is the one PyTorch rounds.
  UnitWeights quanta = Scaled(weights, capacity, 1 / quantum);
  if (quanta.capacity >= kKnapsackWeightLimit) {
    return Error{ErrorCode::kInvalidArgument, "the capacity is 2^57 quanta or more", 0};
  }
  return quanta;
}

}  // namespace modelcache
