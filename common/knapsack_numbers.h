// Doubles to the integers that the knapsack solver counts in, and never over the budget on the way.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/result.h"

namespace modelcache {

// Values times 2^shift, rounded to the nearest integer; the largest shift that keeps their sum
// within half of kKnapsackValueLimit. A choice is off by at most half a unit per item.
struct FixedPointValues {
  std::vector<std::int64_t> values;
  int shift = 0;
  bool exact = true;  // nothing was rounded
};

// Errors: kInvalidArgument for NaN, infinity or a negative number; the message names list and
// index.
Result<FixedPointValues> ToFixedPoint(std::span<const double> values);

// Weights in whole units, and the capacity in the same. A choice within the units is within the
// doubles: its sum is at most capacity * (1 + 2^-49).
struct UnitWeights {
  std::vector<std::uint64_t> weights;
  std::uint64_t capacity = 0;
  double units_per_one = 1;  // units in a weight of 1.0
};

// Weights in units of 1/10,000 or 10^-9 where all of them are whole numbers of it within the
// rounding of a double, so that decimal fractions add up as written (0.1 + 0.2 within 0.3). Other
// weights are rounded up, and the capacity down, at 2^-56 of what they sum up to.
// Errors: as ToFixedPoint.
Result<UnitWeights> ToExactUnits(std::span<const double> weights, double capacity);

// Weights in units of `quantum`, rounded up, the capacity rounded down; whole numbers within the
// rounding of a double stay what they are. REQUIRES quantum above 0.
// Errors: as ToFixedPoint; kInvalidArgument when the capacity is 2^57 quanta or more.
Result<UnitWeights> ToQuanta(std::span<const double> weights, double capacity, double quantum);

}  // namespace modelcache
