// Efficiency order by exact comparison, linear bound, greedy choices, multiplier by tangents.
#include "common/knapsack_order.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace modelcache::knapsack {
namespace {

struct Key {
  double ratio = 0;
  std::uint32_t position = 0;
};

// Doubles decide unless two ratios are closer than their rounding; then the cross product does.
class Better {
 public:
  Better(const std::vector<Item>& items, std::int64_t price) : items_(items), price_(price) {}

  bool operator()(const Key& a, const Key& b) const {
    const double apart = a.ratio - b.ratio;
    const double doubt = 1e-13 * (std::fabs(a.ratio) + std::fabs(b.ratio));
    return std::fabs(apart) > doubt ? apart > 0 : ExactlyBetter(a, b);
  }

 private:
  [[nodiscard]] bool ExactlyBetter(const Key& a, const Key& b) const {
    const Item& x = items_[a.position];
    const Item& y = items_[b.position];
    const Wide left = Wide{x.value - price_} * y.weight;
    const Wide right = Wide{y.value - price_} * x.weight;
    if (left != right) {
      return left > right;
    }
    if (x.weight != y.weight) {
      return (x.weight < y.weight) == (price_ > 0);
    }
    return x.index < y.index;
  }

  const std::vector<Item>& items_;
  std::int64_t price_;
};

// One point of the dual function mu -> LP(values - mu) + mu * cardinality.
struct DualPoint {
  double price = 0;
  double bound = 0;
  double slope = 0;
};

class Dual {
 public:
  Dual(const std::vector<Item>& items, std::int64_t capacity, std::int64_t cardinality)
      : items_(items), capacity_(capacity), cardinality_(cardinality) {}

  DualPoint At(double price) {
    entries_.clear();
    for (const Item& item : items_) {
      const double worth = static_cast<double>(item.value) - price;
      if (worth > 0) {
        const auto weight = static_cast<double>(item.weight);
        entries_.push_back({worth / weight, weight, worth});
      }
    }
    return Fill(price);
  }

 private:
  struct Entry {
    double ratio;
    double weight;
    double worth;
  };

  // Weighted selection: the sum over the best entries that fit, the last one in part.
  DualPoint Fill(double price) {
    auto left = static_cast<double>(capacity_);
    double worth = 0;
    double count = 0;
    auto begin = entries_.begin();
    auto end = entries_.end();
    while (end - begin > 1) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end,
                       [](const Entry& a, const Entry& b) { return a.ratio > b.ratio; });
      double weight_sum = 0;
      double worth_sum = 0;
      for (auto entry = begin; entry != middle; ++entry) {
        weight_sum += entry->weight;
        worth_sum += entry->worth;
      }
      if (weight_sum <= left) {
        left -= weight_sum;
        worth += worth_sum;
        count += static_cast<double>(middle - begin);
        begin = middle;
      } else {
        end = middle;
      }
    }
    if (begin != end) {
      const double part = std::min(1.0, left / begin->weight);
      worth += part * begin->worth;
      count += part;
    }
    const auto limit = static_cast<double>(cardinality_);
    return {price, worth + price * limit, limit - count};
  }

  const std::vector<Item>& items_;
  std::int64_t capacity_;
  std::int64_t cardinality_;
  std::vector<Entry> entries_;
};

// The lowest point of the convex dual between two prices, by intersecting tangents.
DualPoint Lowest(Dual& dual, double low_price, double high_price) {
  DualPoint low = dual.At(low_price);
  DualPoint high = dual.At(high_price);
  DualPoint best = low.bound <= high.bound ? low : high;
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds && high.price - low.price > 1; ++round) {
    if (low.slope >= 0 || high.slope <= 0) {
      break;
    }
    const double rise = (low.bound - high.bound) + high.slope * (high.price - low.price);
    double price = std::round(low.price + rise / (high.slope - low.slope));
    price = std::clamp(price, low.price + 1, high.price - 1);
    const DualPoint point = dual.At(price);
    if (point.bound < best.bound) {
      best = point;
    }
    (point.slope < 0 ? low : high) = point;
    if (point.slope == 0) {
      break;
    }
  }
  return best;
}

std::int64_t LightestThatFit(const Order& order) {
  std::vector<std::int64_t> weights;
  weights.reserve(order.items.size());
  for (const Item& item : order.items) {
    weights.push_back(item.weight);
  }
  std::sort(weights.begin(), weights.end());
  std::int64_t left = order.capacity;
  std::int64_t count = 0;
  for (const std::int64_t weight : weights) {
    left -= weight;
    if (left < 0) {
      break;
    }
    ++count;
  }
  return count;
}

std::int64_t MostValuableToBeat(const Order& order, std::int64_t value) {
  std::vector<std::int64_t> values;
  values.reserve(order.items.size());
  for (const Item& item : order.items) {
    values.push_back(item.value);
  }
  std::sort(values.begin(), values.end(), std::greater<>());
  std::int64_t sum = 0;
  std::int64_t count = 0;
  for (const std::int64_t one : values) {
    if (sum > value) {
      break;
    }
    sum += one;
    ++count;
  }
  return count;
}

}  // namespace

std::int64_t MulDivFloor(std::int64_t a, std::int64_t b, std::int64_t c) {
  const Wide product = Wide{a} * b;
  Wide quotient = product / c;
  if (product % c < 0) {
    --quotient;
  }
  return static_cast<std::int64_t>(quotient);
}

Order MakeOrder(std::vector<Item> items, std::int64_t capacity, Multiplier multiplier) {
  std::vector<Key> keys(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    keys[i] = {static_cast<double>(items[i].value - multiplier.price) /
                   static_cast<double>(items[i].weight),
               static_cast<std::uint32_t>(i)};
  }
  std::sort(keys.begin(), keys.end(), Better(items, multiplier.price));
  Order order;
  order.multiplier = multiplier;
  order.capacity = capacity;
  order.residual = capacity;
  order.items.reserve(items.size());
  for (const Key& key : keys) {
    order.items.push_back(items[key.position]);
  }
  for (const Item& item : order.items) {
    if (item.weight > order.residual || item.value <= multiplier.price) {
      break;
    }
    order.residual -= item.weight;
    order.base_value += item.value;
    ++order.split;
  }
  return order;
}

std::int64_t LinearBound(const Order& order) {
  const auto count = static_cast<std::int64_t>(order.split);
  std::int64_t bound =
      order.base_value + order.multiplier.price * (order.multiplier.cardinality - count);
  if (order.split < order.items.size() && order.Worth(order.split) > 0) {
    bound += MulDivFloor(order.residual, order.Worth(order.split), order.items[order.split].weight);
  }
  return bound;
}

bool FlipCanReach(const Order& order, std::size_t position, std::int64_t value) {
  const Item& item = order.items[position];
  const std::int64_t sign = position < order.split ? -1 : 1;
  const std::int64_t residual = order.residual - sign * item.weight;
  const std::int64_t count = static_cast<std::int64_t>(order.split) + sign;
  const std::int64_t missing = value - order.base_value - sign * item.value -
                               order.multiplier.price * (order.multiplier.cardinality - count);
  if (residual >= 0) {
    if (missing <= 0) {
      return true;
    }
    return order.split < order.items.size() && order.Worth(order.split) > 0 &&
           Wide{missing} * order.items[order.split].weight <=
               Wide{residual} * order.Worth(order.split);
  }
  return order.split > 0 && Wide{missing} * order.items[order.split - 1].weight <=
                                Wide{residual} * order.Worth(order.split - 1);
}

Choice GreedyChoice(const Order& order) {
  Choice fill{{}, order.base_value};
  std::int64_t left = order.residual;
  for (std::size_t i = order.split; i < order.items.size(); ++i) {
    if (order.items[i].weight <= left) {
      left -= order.items[i].weight;
      fill.value += order.items[i].value;
      fill.flips.push_back(static_cast<std::uint32_t>(i));
    }
  }
  Choice swap{{}, order.base_value};
  const auto consider = [&](std::size_t out, std::size_t in) {
    const Item& leaves = order.items[out];
    const Item& comes = order.items[in];
    const std::int64_t value = order.base_value - leaves.value + comes.value;
    if (comes.weight <= order.residual + leaves.weight && value > swap.value) {
      swap = {{static_cast<std::uint32_t>(out), static_cast<std::uint32_t>(in)}, value};
    }
  };
  if (order.split > 0 && order.split < order.items.size()) {
    for (std::size_t out = 0; out < order.split; ++out) {
      consider(out, order.split);
    }
    for (std::size_t in = order.split; in < order.items.size(); ++in) {
      consider(order.split - 1, in);
    }
  }
  Choice best = swap.value > fill.value ? std::move(swap) : std::move(fill);
  for (std::size_t i = order.split; i < order.items.size(); ++i) {  // one item in place of all
    if (order.items[i].weight <= order.capacity && order.items[i].value > best.value) {
      best = {{static_cast<std::uint32_t>(i)}, order.items[i].value};
      for (std::size_t out = 0; out < order.split; ++out) {
        best.flips.push_back(static_cast<std::uint32_t>(out));
      }
    }
  }
  return best;
}

std::optional<Multiplier> FindMultiplier(const Order& order, std::int64_t value) {
  const auto count = static_cast<std::int64_t>(order.split);
  const bool all = order.split == order.items.size();
  std::int64_t highest = 0;
  for (const Item& item : order.items) {
    highest = std::max(highest, item.value);
  }
  const double most = 0x1p61 / static_cast<double>(order.items.size() + 1);
  const double reach = std::min(static_cast<double>(highest), most);
  std::optional<Multiplier> best;
  double best_bound = static_cast<double>(LinearBound(order));
  const auto consider = [&](std::int64_t cardinality, double low, double high) {
    Dual dual(order.items, order.capacity, cardinality);
    const DualPoint point = Lowest(dual, low, high);
    if (point.price != 0 && point.bound < best_bound) {
      best_bound = point.bound;
      best = Multiplier{static_cast<std::int64_t>(point.price), cardinality};
    }
  };
  const std::int64_t at_most = LightestThatFit(order);
  if (!all && order.residual > 0 && count >= at_most) {
    consider(at_most, 0, reach);
  }
  const std::int64_t at_least = MostValuableToBeat(order, value);
  if (count < at_least) {
    consider(at_least, -reach, 0);
  }
  return best;
}

}  // namespace modelcache::knapsack
