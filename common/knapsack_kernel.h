// The inner loops of the dense tables, for the widest vectors the processor has. Internal to the
// knapsack solver. Every width gives the same result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace modelcache::knapsack {

// An item as a table sees it.
template <typename Cell>
struct TableItem {
  std::size_t weight = 0;  // above 0
  Cell value = 0;
};

// Cells [low, high) of a profile: profile[j] is the best value within capacity j.
struct CellRange {
  std::size_t low = 0;
  std::size_t high = 0;
};

// profile[j] = max(profile[j], profile[j - weight] + value) for every j of the range from its end
// on, so that each item counts once. Cells below the weight keep their value.
// Cell is std::int32_t or std::int64_t. REQUIRES that no sum leaves the type.
template <typename Cell>
void AddItem(Cell* profile, CellRange range, TableItem<Cell> item);

// As AddItem for `first`, then `second`, in one pass over memory. `first` alone need not be right
// below range.low.
template <typename Cell>
void AddItemPair(Cell* profile, CellRange range, TableItem<Cell> first, TableItem<Cell> second);

}  // namespace modelcache::knapsack
