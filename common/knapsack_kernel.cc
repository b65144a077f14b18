// Vector loops over a profile, one text compiled for three widths.
#include "common/knapsack_kernel.h"

#include <algorithm>
#include <cstring>

namespace modelcache::knapsack {
namespace {

#define MODELCACHE_INLINE [[gnu::always_inline]] inline

template <typename Cell, std::size_t kBytes>
struct Vectors {
  typedef Cell Type __attribute__((vector_size(kBytes)));  // NOLINT(modernize-use-using)
  static constexpr std::size_t kLanes = kBytes / sizeof(Cell);

  MODELCACHE_INLINE static void Load(Type& to, const Cell* from) {
    std::memcpy(&to, from, sizeof to);
  }
  MODELCACHE_INLINE static void Store(Cell* to, const Type& from) {
    std::memcpy(to, &from, sizeof from);
  }
};

// A block reads every source before it writes, and sources lie at lower addresses, which are
// written later: right for any weight above 0.
template <typename Cell, std::size_t kBytes>
MODELCACHE_INLINE void OneLoop(Cell* profile, CellRange range, TableItem<Cell> item) {
  using V = Vectors<Cell, kBytes>;
  std::size_t j = range.high;
  while (j >= range.low + V::kLanes) {
    j -= V::kLanes;
    typename V::Type without;
    typename V::Type with;
    V::Load(without, profile + j);
    V::Load(with, profile + j - item.weight);
    with += item.value;
    V::Store(profile + j, without > with ? without : with);
  }
  while (j > range.low) {
    --j;
    profile[j] = std::max<Cell>(profile[j], profile[j - item.weight] + item.value);
  }
}

template <typename Cell, std::size_t kBytes>
MODELCACHE_INLINE void TwoLoop(Cell* profile, CellRange range, TableItem<Cell> first,
                               TableItem<Cell> second) {
  using V = Vectors<Cell, kBytes>;
  const std::size_t both = first.weight + second.weight;
  const Cell both_value = first.value + second.value;
  std::size_t j = range.high;
  while (j >= range.low + V::kLanes) {
    j -= V::kLanes;
    typename V::Type best;
    typename V::Type one;
    typename V::Type two;
    typename V::Type three;
    V::Load(best, profile + j);
    V::Load(one, profile + j - first.weight);
    V::Load(two, profile + j - second.weight);
    V::Load(three, profile + j - both);
    one += first.value;
    two += second.value;
    three += both_value;
    best = best > one ? best : one;
    two = two > three ? two : three;
    V::Store(profile + j, best > two ? best : two);
  }
  while (j > range.low) {
    --j;
    profile[j] =
        std::max({profile[j], profile[j - first.weight] + first.value,
                  profile[j - second.weight] + second.value, profile[j - both] + both_value});
  }
}

template <typename Cell, std::size_t kBytes>
MODELCACHE_INLINE void One(Cell* profile, CellRange range, TableItem<Cell> item) {
  OneLoop<Cell, kBytes>(profile, {std::max(range.low, item.weight), range.high}, item);
}

// The cells where both fit, then those where one of them does.
template <typename Cell, std::size_t kBytes>
MODELCACHE_INLINE void Two(Cell* profile, CellRange range, TableItem<Cell> a, TableItem<Cell> b) {
  const TableItem<Cell> light = a.weight <= b.weight ? a : b;
  const TableItem<Cell> heavy = a.weight <= b.weight ? b : a;
  const auto part = [&](std::size_t low, std::size_t high) {
    return CellRange{std::max(range.low, low), std::min(range.high, high)};
  };
  TwoLoop<Cell, kBytes>(profile, part(light.weight + heavy.weight, range.high), light, heavy);
  const CellRange middle = part(heavy.weight, light.weight + heavy.weight);
  for (std::size_t j = middle.high; j > middle.low;) {
    --j;
    profile[j] = std::max({profile[j], profile[j - light.weight] + light.value,
                           profile[j - heavy.weight] + heavy.value});
  }
  OneLoop<Cell, kBytes>(profile, part(light.weight, heavy.weight), light);
}

template <typename Cell>
struct Table {
  void (*one)(Cell*, CellRange, TableItem<Cell>);
  void (*two)(Cell*, CellRange, TableItem<Cell>, TableItem<Cell>);
};

template <typename Cell>
void OnePlain(Cell* profile, CellRange range, TableItem<Cell> item) {
  One<Cell, 16>(profile, range, item);
}
template <typename Cell>
void TwoPlain(Cell* profile, CellRange range, TableItem<Cell> a, TableItem<Cell> b) {
  Two<Cell, 16>(profile, range, a, b);
}
#if defined(__x86_64__)
template <typename Cell>
[[gnu::target("avx2")]] void OneAvx2(Cell* profile, CellRange range, TableItem<Cell> item) {
  One<Cell, 32>(profile, range, item);
}
template <typename Cell>
[[gnu::target("avx2")]] void TwoAvx2(Cell* profile, CellRange range, TableItem<Cell> a,
                                     TableItem<Cell> b) {
  Two<Cell, 32>(profile, range, a, b);
}
template <typename Cell>
[[gnu::target("avx512f,avx512vl,avx512bw")]] void OneAvx512(Cell* profile, CellRange range,
                                                            TableItem<Cell> item) {
  One<Cell, 64>(profile, range, item);
}
template <typename Cell>
[[gnu::target("avx512f,avx512vl,avx512bw")]] void TwoAvx512(Cell* profile, CellRange range,
                                                            TableItem<Cell> a, TableItem<Cell> b) {
  Two<Cell, 64>(profile, range, a, b);
}
#endif

template <typename Cell>
Table<Cell> Choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw")) {
    return {OneAvx512<Cell>, TwoAvx512<Cell>};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {OneAvx2<Cell>, TwoAvx2<Cell>};
  }
#endif
  return {OnePlain<Cell>, TwoPlain<Cell>};
}

template <typename Cell>
const Table<Cell>& Kernels() {
  static const Table<Cell> table = Choose<Cell>();
  return table;
}

}  // namespace

template <typename Cell>
void AddItem(Cell* profile, CellRange range, TableItem<Cell> item) {
  Kernels<Cell>().one(profile, range, item);
}

template <typename Cell>
void AddItemPair(Cell* profile, CellRange range, TableItem<Cell> first, TableItem<Cell> second) {
  Kernels<Cell>().two(profile, range, first, second);
}

template void AddItem(std::int32_t*, CellRange, TableItem<std::int32_t>);
template void AddItem(std::int64_t*, CellRange, TableItem<std::int64_t>);
template void AddItemPair(std::int32_t*, CellRange, TableItem<std::int32_t>,
                          TableItem<std::int32_t>);
template void AddItemPair(std::int64_t*, CellRange, TableItem<std::int64_t>,
                          TableItem<std::int64_t>);

}  // namespace modelcache::knapsack
