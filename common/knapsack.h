// The exact 0/1 knapsack: which items to keep within a capacity so that their value is largest.
//
// Integers throughout: no rounding, no clock, no random number, so equal input gives an equal
// answer on every machine. Doubles become integers in knapsack_numbers.h. docs/planner.md has the
// mathematics.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/result.h"

namespace modelcache {

// Sums that stay below these cannot overflow anywhere in the solver.
inline constexpr std::uint64_t kKnapsackWeightLimit = std::uint64_t{1} << 57;
inline constexpr std::int64_t kKnapsackValueLimit = std::int64_t{1} << 61;
inline constexpr std::size_t kKnapsackCountLimit = std::size_t{1} << 24;

enum class KnapsackPin : std::uint8_t { kFree = 0, kIn = 1, kOut = 2 };

struct KnapsackProblem {
  std::span<const std::uint64_t> weights;  // bytes, or any other unit
  std::span<const std::int64_t> values;    // as many as weights, none negative
  std::span<const KnapsackPin> pins;       // empty, or as many as weights
  std::uint64_t capacity = 0;              // in the unit of the weights
};

enum class KnapsackMethod : std::uint8_t {
  kAuto = 0,   // the list core; where its limits stop it and the table is small, the dense one
  kList = 1,   // only the list core
  kDense = 2,  // only the dense tables: time grows with items x capacity, memory with capacity
};

struct KnapsackOptions {
  // The answer may stay behind the optimum by the larger of the two: in value, and as a part of
  // the bound. 0 and 0 ask for the optimum.
  std::int64_t absolute_gap = 0;
  double relative_gap = 0;
  std::size_t memory_limit_bytes = std::size_t{64} << 20;  // of states and tables
  std::uint64_t work_limit = 100'000'000;  // states generated; 32 cells of a table count as one
  unsigned threads = 1;                    // 2: large dense tables use a second thread
  KnapsackMethod method = KnapsackMethod::kAuto;
};

enum class KnapsackStatus : std::uint8_t {
  kOptimal = 0,          // bound == value
  kWithinTolerance = 1,  // bound - value is within the gap that was asked for
  kLimit = 2,            // the work or memory limit ended the search; the bound is still proven
};

struct KnapsackAnswer {
  std::vector<std::uint8_t> taken;  // one per item, 1 or 0
  std::int64_t value = 0;           // of the items taken
  std::uint64_t weight = 0;         // of the items taken; at most the capacity, always
  std::int64_t bound = 0;           // no choice within the capacity is worth more
  KnapsackStatus status = KnapsackStatus::kOptimal;
  std::uint64_t work = 0;         // as counted against work_limit
  std::uint64_t peak_states = 0;  // longest list of states
};

// Items without value are never taken, unless pinned in; items without weight but with value
// always are, unless pinned out. Any thread; holds no state between calls.
// Errors: kInvalidArgument, the message names list and index: lists of unequal length, a negative
// value, a sum of the weights that fit one by one of kKnapsackWeightLimit or more, a sum of their
// values of kKnapsackValueLimit or more, pinned items above the capacity, options out of range.
// kLimit: more than kKnapsackCountLimit items; kDense, and its tables need more memory than
// allowed.
Result<KnapsackAnswer> SolveKnapsack(const KnapsackProblem& problem,
                                     const KnapsackOptions& options);

}  // namespace modelcache
