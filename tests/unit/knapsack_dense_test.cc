// The dense tables and their kernels: every width of cell, windows, leaves, two threads.
#include "common/knapsack_dense.h"

#include "common/knapsack_kernel.h"
#include "tests/unit/knapsack_support.h"

namespace modelcache::knapsack {
namespace {

std::vector<Item> Items(const Instance& instance) {
  std::vector<Item> items;
  for (std::size_t i = 0; i < instance.weights.size(); ++i) {
    items.push_back({static_cast<std::int64_t>(instance.weights[i]), instance.values[i],
                     static_cast<std::uint32_t>(i)});
  }
  return items;
}

std::int64_t DenseValue(const Instance& instance, unsigned threads) {
  const std::vector<std::uint8_t> taken =
      SolveDense(Items(instance), static_cast<std::int64_t>(instance.capacity), threads);
  std::uint64_t weight = 0;
  std::int64_t value = 0;
  for (std::size_t i = 0; i < taken.size(); ++i) {
    weight += taken[i] * instance.weights[i];
    value += taken[i] * instance.values[i];
  }
  CHECK(weight <= instance.capacity);
  return value;
}

template <typename Cell>
void CheckKernels() {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const std::size_t cells = 1 + random() % 200;
    std::vector<Cell> profile(cells);
    for (Cell& cell : profile) {
      cell = static_cast<Cell>(random() % 1000);
    }
    std::sort(profile.begin(), profile.end());
    const TableItem<Cell> a{1 + random() % 80, static_cast<Cell>(random() % 500)};
    const TableItem<Cell> b{1 + random() % 80, static_cast<Cell>(random() % 500)};
    const std::size_t low = random() % cells;
    std::vector<Cell> slow = profile;
    for (const auto& item : {a, b}) {
      for (std::size_t j = cells; j-- > item.weight;) {
        slow[j] = std::max<Cell>(slow[j], slow[j - item.weight] + item.value);
      }
    }
    std::vector<Cell> pair = profile;
    AddItemPair(pair.data(), {low, cells}, a, b);
    std::vector<Cell> single = profile;
    AddItem(single.data(), {0, cells}, a);
    AddItem(single.data(), {low, cells}, b);
    for (std::size_t j = 0; j < cells; ++j) {
      REQUIRE(pair[j] == (j < low ? profile[j] : slow[j]));
      REQUIRE((j < low || single[j] == slow[j]));
    }
  }
}

TEST_CASE("Knapsack kernels: pairs and single items do what one cell at a time does", "[unit]") {
  CheckKernels<std::int32_t>();
  CheckKernels<std::int64_t>();
}

TEST_CASE("Knapsack tables: leaves, splits and both cell widths find the optimum", "[unit]") {
  std::mt19937_64 random(2);
  for (const std::string& name : ClassNames()) {
    if (name == "zero_weights") {
      continue;  // decided before the tables
    }
    for (const std::size_t count : {2, 3, 40, 120}) {
      Instance instance = Generate(name, count, name == "similar" ? 20 : 200, random);
      INFO(name << " n=" << count);
      CHECK(DenseValue(instance, 1) == Optimum(instance));
      for (std::int64_t& value : instance.values) {
        value += std::int64_t{1} << 40;  // needs 64-bit cells
      }
      CHECK(DenseValue(instance, 1) == Optimum(instance));
    }
  }
}

TEST_CASE("Knapsack tables: two threads give what one gives", "[unit]") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 3; ++round) {
    const Instance instance = Generate("weakly", 400, 1000, random);
    const std::vector<Item> items = Items(instance);
    const auto capacity = static_cast<std::int64_t>(instance.capacity);
    CHECK(SolveDense(items, capacity, 2) == SolveDense(items, capacity, 1));
    CHECK(DenseValue(instance, 2) == Optimum(instance));
  }
}

TEST_CASE("Knapsack tables: two disjoint lists split the capacity like their union", "[unit]") {
  std::mt19937_64 random(4);
  const Instance all = Generate("uncorrelated", 100, 100, random);
  Instance left = all;
  Instance right = all;
  left.weights.resize(50);
  left.values.resize(50);
  right.weights.erase(right.weights.begin(), right.weights.begin() + 50);
  right.values.erase(right.values.begin(), right.values.begin() + 50);
  const std::vector<std::int64_t> f = Profile(left);
  const std::vector<std::int64_t> g = Profile(right);
  std::int64_t best = 0;
  for (std::size_t k = 0; k <= all.capacity; ++k) {
    best = std::max(best, f[k] + g[all.capacity - k]);
  }
  CHECK(DenseValue(all, 1) == best);
}

}  // namespace
}  // namespace modelcache::knapsack
