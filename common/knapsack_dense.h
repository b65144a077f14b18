// Dense tables over every capacity, by divide and conquer in memory linear in the capacity
// (Hirschberg). Internal to the knapsack solver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/knapsack_order.h"

namespace modelcache::knapsack {

// Bytes that SolveDense allocates.
std::size_t DenseBytes(const std::vector<Item>& items, std::int64_t capacity);

// Cell updates that it makes at most.
std::uint64_t DenseCells(const std::vector<Item>& items, std::int64_t capacity);

// The optimum: one byte per item, in the order of `items`. With `threads` of 2 and a table that is
// worth it, one more thread runs until the call returns.
// REQUIRES capacity >= 0, sums within the limits of knapsack.h.
std::vector<std::uint8_t> SolveDense(const std::vector<Item>& items, std::int64_t capacity,
                                     unsigned threads);

}  // namespace modelcache::knapsack
