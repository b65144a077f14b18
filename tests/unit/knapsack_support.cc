// Generators of knapsack instances.
#include "tests/unit/knapsack_support.h"

#include <cmath>
#include <numeric>

namespace modelcache {
namespace {

std::int64_t Uniform(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

struct Pair {
  std::int64_t weight;
  std::int64_t value;
};

Pair Circle(std::int64_t weight, std::int64_t range) {
  const double part = static_cast<double>(weight - 2 * range);
  const double root =
      std::sqrt(4.0 * static_cast<double>(range) * static_cast<double>(range) - part * part);
  return {weight, static_cast<std::int64_t>(2.0 / 3.0 * root)};
}

Pair OneOf(const std::string& name, std::int64_t range, std::mt19937_64& random) {
  const std::int64_t tenth = range / 10;
  const std::int64_t w = Uniform(random, 1, range);
  const std::int64_t even = w + w % 2;
  if (name == "weakly") {
    return {w, std::max<std::int64_t>(1, w + Uniform(random, -tenth, tenth))};
  }
  if (name == "strongly") {
    return {w, w + tenth};
  }
  if (name == "inverse") {
    return {w + tenth, w};
  }
  if (name == "almost") {
    return {w, std::max<std::int64_t>(1, w + tenth + Uniform(random, -range / 1000, range / 1000))};
  }
  if (name == "subset_sum") {
    return {w, w};
  }
  if (name == "even_subset") {
    return {even, even};
  }
  if (name == "even_odd") {
    return {even, even + tenth};
  }
  if (name == "similar") {
    return {100 * range + Uniform(random, 0, std::max<std::int64_t>(0, tenth - 1)),
            Uniform(random, 1, range)};
  }
  if (name == "mstr") {
    return {w, w + (w % 6 == 0 ? 3 * range / 10 : 2 * range / 10)};
  }
  if (name == "pceil") {
    return {w, 3 * ((w + 2) / 3)};
  }
  if (name == "circle") {
    return Circle(w, range);
  }
  if (name == "equal_weights") {
    return {std::max<std::int64_t>(1, range / 2), Uniform(random, 1, range)};
  }
  if (name == "zero_weights") {
    return {Uniform(random, 0, 4) == 0 ? 0 : w, Uniform(random, 0, range)};
  }
  return {w, Uniform(random, 1, range)};
}

Instance Span(const std::string& base, std::size_t count, std::int64_t range,
              std::mt19937_64& random) {
  std::vector<Pair> set;
  for (int i = 0; i < 2; ++i) {
    const Pair pair = OneOf(base, range, random);
    set.push_back({(pair.weight + 4) / 5, (pair.value + 4) / 5});
  }
  Instance instance;
  for (std::size_t i = 0; i < count; ++i) {
    const Pair& pair = set[static_cast<std::size_t>(Uniform(random, 0, 1))];
    const std::int64_t times = Uniform(random, 1, 10);
    instance.weights.push_back(static_cast<std::uint64_t>(pair.weight * times));
    instance.values.push_back(pair.value * times);
  }
  return instance;
}

}  // namespace

void SetCapacity(Instance& instance, double part) {
  const std::uint64_t sum =
      std::accumulate(instance.weights.begin(), instance.weights.end(), std::uint64_t{0});
  instance.capacity = std::max(static_cast<std::uint64_t>(part * static_cast<double>(sum)),
                               *std::max_element(instance.weights.begin(), instance.weights.end()));
}

Instance Generate(const std::string& name, std::size_t count, std::int64_t range,
                  std::mt19937_64& random) {
  Instance instance;
  if (name.rfind("span_", 0) == 0) {
    instance = Span(name == "span_uncorr" ? "uncorrelated" : name.substr(5), count, range, random);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const Pair pair = OneOf(name, range, random);
      instance.weights.push_back(static_cast<std::uint64_t>(pair.weight));
      instance.values.push_back(pair.value);
    }
  }
  SetCapacity(instance, static_cast<double>(Uniform(random, 1, 9)) / 10);
  if (name == "even_subset" || name == "even_odd") {
    instance.capacity |= 1;
  }
  return instance;
}

Instance GeneratePlanner(const std::string& name, std::size_t count, std::mt19937_64& random) {
  std::uniform_real_distribution<double> exponent(20, 36);
  std::lognormal_distribution<double> noise(0, 0.1);
  Instance instance;
  for (std::size_t i = 0; i < count; ++i) {
    double bytes = std::floor(std::exp2(exponent(random)));
    double value = bytes / 2 + 5e8;
    if (name == "reload_noisy") {
      value *= noise(random);
    } else if (name == "reload_tiers") {
      const double speed[] = {0.15, 2, 6};
      value = bytes / speed[Uniform(random, 0, 2)] + 5e8;
    } else if (name == "flops") {
      const std::int64_t times[] = {1, 4, 16, 64};
      const std::int64_t cost[] = {512, 1024, 4096};
      bytes = static_cast<double>(512 * Uniform(random, 1, 1 << 15) * times[Uniform(random, 0, 3)]);
      value = Uniform(random, 0, 1) == 0
                  ? 1
                  : 2 * bytes * static_cast<double>(cost[Uniform(random, 0, 2)]);
    }
    instance.weights.push_back(static_cast<std::uint64_t>(bytes));
    instance.values.push_back(static_cast<std::int64_t>(value));
  }
  SetCapacity(instance, static_cast<double>(Uniform(random, 1, 9)) / 10);
  return instance;
}

}  // namespace modelcache
