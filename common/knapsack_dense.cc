// Divide and conquer over the items; each half's profile in one array, decisions only in the
// leaves.
#include "common/knapsack_dense.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "common/knapsack_kernel.h"

namespace modelcache::knapsack {
namespace {

constexpr std::size_t kLeafCells = std::size_t{1} << 15;  // rows of a leaf: they stay in the cache
constexpr std::size_t kRowCells = 2 * kLeafCells;         // with the empty row before them
constexpr std::uint64_t kThreadCells = std::uint64_t{1} << 20;  // a thread costs as much as these

std::int64_t WeightOf(const std::vector<Item>& items) {
  std::int64_t sum = 0;
  for (const Item& item : items) {
    sum += item.weight;
  }
  return sum;
}

bool FitsNarrow(const std::vector<Item>& items) {
  std::int64_t sum = 0;
  for (const Item& item : items) {
    sum += item.value;
  }
  return sum < (std::int64_t{1} << 31);
}

template <typename Cell>
class Hirschberg {
 public:
  Hirschberg(const std::vector<Item>& items, std::vector<std::uint8_t>& taken)
      : taken_(taken), prefix_(items.size() + 1, 0) {
    items_.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      items_.push_back(
          {static_cast<std::size_t>(items[i].weight), static_cast<Cell>(items[i].value)});
      prefix_[i + 1] = prefix_[i] + items_[i].weight;
    }
  }

  void Run(std::size_t capacity, unsigned threads) {
    // Not zeroed: pages that are never touched cost nothing.
    const std::unique_ptr<Cell[]> cells(new Cell[2 * (capacity + 2) + 4]);
    const std::unique_ptr<Cell[]> rows(new Cell[2 * kRowCells]);
    Solve({0, items_.size()}, capacity, {cells.get(), rows.get()}, threads);
  }

 private:
  struct Part {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  [[nodiscard]] std::size_t Weight(Part part) const {
    return prefix_[part.end] - prefix_[part.begin];
  }

  // `profiles` holds 2 * (capacity + 2) cells, `rows` kRowCells, for one thread.
  struct Space {
    Cell* profiles;
    Cell* rows;
  };

  // Decides the items of `part` for `capacity`.
  void Solve(Part part, std::size_t capacity, Space space, unsigned threads) {
    if (Weight(part) <= capacity) {
      std::fill(taken_.begin() + static_cast<std::ptrdiff_t>(part.begin),
                taken_.begin() + static_cast<std::ptrdiff_t>(part.end), std::uint8_t{1});
      return;
    }
    const std::size_t count = part.end - part.begin;
    if (count == 1) {
      return;  // heavier than the capacity
    }
    if (count <= kLeafCells / (capacity + 1)) {
      Leaf(part, capacity, space.rows);
      return;
    }
    const std::size_t middle = part.begin + count / 2;
    const Part left{part.begin, middle};
    const Part right{middle, part.end};
    const bool parallel = threads > 1 && count * (capacity + 1) >= kThreadCells;
    Cell* const cells = space.profiles;
    Cell* const right_cells = cells + capacity + 2;
    Both(
        parallel, [&] { Profile(left, capacity, Spare(capacity, Weight(right)), cells); },
        [&] { Profile(right, capacity, Spare(capacity, Weight(left)), right_cells); });
    const std::size_t share = BestShare(left, right, capacity, cells);
    // One after the other, the halves use the same cells; two threads need four more in all.
    const Space other = parallel ? Space{cells + 2 * (share + 2), space.rows + kRowCells} : space;
    Both(
        parallel, [&] { Solve(left, share, space, 1); },
        [&] { Solve(right, capacity - share, other, 1); });
  }

  template <typename First, typename Second>
  static void Both(bool parallel, const First& first, const Second& second) {
    if (!parallel) {
      first();
      second();
      return;
    }
    std::thread other(second);
    first();
    other.join();
  }

  // The least capacity that is left when the other half takes all it can.
  static std::size_t Spare(std::size_t capacity, std::size_t other) {
    return capacity > other ? capacity - other : 0;
  }

  // profile[j] for j from `need` to min(capacity, weight of the part). Cells that no needed one
  // comes from are not kept up; cells above the weight so far are all equal and not written.
  void Profile(Part part, std::size_t capacity, std::size_t need, Cell* profile) const {
    profile[0] = 0;
    std::size_t high = 0;
    for (std::size_t i = part.begin; i < part.end;) {
      const std::size_t step = std::min<std::size_t>(2, part.end - i);
      const std::size_t grown = std::min(capacity, prefix_[i + step] - prefix_[part.begin]);
      std::fill(profile + high + 1, profile + grown + 1, profile[high]);
      high = grown;
      const std::size_t later = prefix_[part.end] - prefix_[i + step];
      const CellRange range{Spare(need, later), high + 1};
      if (step == 2) {
        AddItemPair(profile, range, items_[i], items_[i + 1]);
      } else {
        AddItem(profile, range, items_[i]);
      }
      i += step;
    }
  }

  // How much of the capacity the left half gets; the first of the best.
  [[nodiscard]] std::size_t BestShare(Part left, Part right, std::size_t capacity,
                                      const Cell* cells) const {
    const Cell* const right_cells = cells + capacity + 2;
    std::size_t best = Spare(capacity, Weight(right));
    const std::size_t last = std::min(capacity, Weight(left));
    Cell best_value = cells[best] + right_cells[capacity - best];
    for (std::size_t k = best + 1; k <= last; ++k) {
      const Cell value = cells[k] + right_cells[capacity - k];
      if (value > best_value) {
        best_value = value;
        best = k;
      }
    }
    return best;
  }

  // All rows at once, then back from the last one.
  void Leaf(Part part, std::size_t capacity, Cell* row) {
    const std::size_t stride = capacity + 1;
    const std::size_t count = part.end - part.begin;
    row[0] = 0;
    std::size_t high = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Cell* const from = row + i * stride;
      Cell* const to = row + (i + 1) * stride;
      const std::size_t grown =
          std::min(capacity, prefix_[part.begin + i + 1] - prefix_[part.begin]);
      std::copy(from, from + high + 1, to);
      std::fill(to + high + 1, to + grown + 1, from[high]);
      high = grown;
      AddItem(to, {0, high + 1}, items_[part.begin + i]);
    }
    std::size_t at = high;
    for (std::size_t i = count; i-- > 0;) {
      const std::size_t before = std::min(capacity, prefix_[part.begin + i] - prefix_[part.begin]);
      if (row[(i + 1) * stride + at] != row[i * stride + std::min(at, before)]) {
        taken_[part.begin + i] = 1;
        at -= items_[part.begin + i].weight;
      }
      at = std::min(at, before);
    }
  }

  std::vector<TableItem<Cell>> items_;
  std::vector<std::uint8_t>& taken_;
  std::vector<std::size_t> prefix_;
};

}  // namespace

std::size_t DenseBytes(const std::vector<Item>& items, std::int64_t capacity) {
  const std::size_t cell = FitsNarrow(items) ? 4 : 8;
  const auto cells = static_cast<std::size_t>(std::min(capacity, WeightOf(items)));
  return (2 * (cells + 4) + 2 * kRowCells) * cell;
}

std::uint64_t DenseCells(const std::vector<Item>& items, std::int64_t capacity) {
  const Wide cells = Wide{2} * static_cast<std::int64_t>(items.size()) * (capacity + 1);
  return cells > (Wide{1} << 62) ? std::uint64_t{1} << 62 : static_cast<std::uint64_t>(cells);
}

std::vector<std::uint8_t> SolveDense(const std::vector<Item>& items, std::int64_t capacity,
                                     unsigned threads) {
  std::vector<std::uint8_t> taken(items.size(), 0);
  const auto cells = static_cast<std::size_t>(std::min(capacity, WeightOf(items)));
  if (FitsNarrow(items)) {
    Hirschberg<std::int32_t>(items, taken).Run(cells, threads);
  } else {
    Hirschberg<std::int64_t>(items, taken).Run(cells, threads);
  }
  return taken;
}

}  // namespace modelcache::knapsack
