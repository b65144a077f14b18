// Items in the order of their efficiency, the bounds that follow from it, and the cardinality
// multiplier. Internal to the knapsack solver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace modelcache::knapsack {

// Products of a weight and a value need 118 bits.
__extension__ using Wide = __int128;

struct Item {
  std::int64_t weight = 0;  // above 0
  std::int64_t value = 0;   // above 0
  std::uint32_t index = 0;  // the caller's number
};

// A number of items that every choice worth having keeps to, with its price: each item's value
// counts less by `price`, and `cardinality` times the price is granted once. A positive price goes
// with an upper limit, a negative one with a lower limit, 0 with none.
struct Multiplier {
  std::int64_t price = 0;
  std::int64_t cardinality = 0;
};

// Items sorted by (value - price) / weight, best first. Items before `split` form the base: the
// longest beginning that fits and is worth its price.
struct Order {
  std::vector<Item> items;
  Multiplier multiplier;
  std::size_t split = 0;
  std::int64_t capacity = 0;
  std::int64_t residual = 0;    // capacity that the base leaves
  std::int64_t base_value = 0;  // true value of the base

  [[nodiscard]] std::int64_t Worth(std::size_t position) const {
    return items[position].value - multiplier.price;
  }
};

// floor(a * b / c), for c above 0.
std::int64_t MulDivFloor(std::int64_t a, std::int64_t b, std::int64_t c);

// REQUIRES weights and values above 0, sums within the limits of knapsack.h, and
// |price| * (items + 1) <= 2^61. Among equal ratios the lighter item comes first when the price is
// positive, else the heavier; after that the lower index.
Order MakeOrder(std::vector<Item> items, std::int64_t capacity, Multiplier multiplier);

// No choice within the capacity (and within the multiplier's cardinality) is worth more.
std::int64_t LinearBound(const Order& order);

// Whether a choice that differs from the base at `position` can be worth `value`, by the linear
// bound; choices outside the multiplier's cardinality do not count.
bool FlipCanReach(const Order& order, std::size_t position, std::int64_t value);

// The items a choice takes, as flips of the base, and its value.
struct Choice {
  std::vector<std::uint32_t> flips;  // positions in the order
  std::int64_t value = 0;
};

// The best of some simple choices: fill up in order, exchange one item.
Choice GreedyChoice(const Order& order);

// The multiplier with the lowest bound, when a limit on the number of items cuts the linear
// relaxation of `order` (whose price is 0): more than fit of the lightest, or fewer than are
// needed of the most valuable to beat `value`.
std::optional<Multiplier> FindMultiplier(const Order& order, std::int64_t value);

}  // namespace modelcache::knapsack
