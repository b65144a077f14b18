// SolveKnapsack: exhaustive small grids, an integer oracle on every class, properties, tiny limits.
#include "common/knapsack.h"

#include <numeric>

#include "tests/unit/knapsack_support.h"

namespace modelcache {
namespace {

KnapsackOptions With(KnapsackMethod method) {
  KnapsackOptions options;
  options.method = method;
  return options;
}

// Every method, against the oracle.
void CheckOptimal(const Instance& instance) {
  const std::int64_t optimum = Optimum(instance);
  for (const auto method : {KnapsackMethod::kAuto, KnapsackMethod::kList, KnapsackMethod::kDense}) {
    const KnapsackAnswer answer = Solved(instance, With(method));
    CHECK(answer.value == optimum);
    CHECK(answer.status == KnapsackStatus::kOptimal);
  }
}

// Calls `each` with every vector of `length` numbers from `low` to `high`.
template <typename Number, typename Each>
void ForAll(std::size_t length, Number low, Number high, const Each& each) {
  std::vector<Number> numbers(length, low);
  while (true) {
    each(numbers);
    std::size_t i = 0;
    while (i < length && numbers[i] == high) {
      numbers[i++] = low;
    }
    if (i == length) {
      return;
    }
    ++numbers[i];
  }
}

TEST_CASE("Knapsack: every instance of up to three small items is solved at every capacity",
          "[unit]") {
  std::uint64_t wrong = 0;
  std::uint64_t count = 0;
  for (std::size_t length = 0; length <= 3; ++length) {
    ForAll<std::uint64_t>(length, 0, 4, [&](const std::vector<std::uint64_t>& weights) {
      ForAll<std::int64_t>(length, 0, 3, [&](const std::vector<std::int64_t>& values) {
        Instance instance{weights, values, 1};
        instance.capacity += std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
        const std::vector<std::int64_t> best = Profile(instance);
        for (std::uint64_t capacity = 0; capacity < best.size(); ++capacity) {
          instance.capacity = capacity;
          for (const auto method : {KnapsackMethod::kList, KnapsackMethod::kDense}) {
            const auto answer = SolveKnapsack(Problem(instance), With(method));
            wrong += !answer.ok() || answer->value != best[capacity] ||
                     answer->bound != best[capacity] || answer->weight > capacity;
            ++count;
          }
        }
      });
    });
  }
  CHECK(wrong == 0);
  CHECK(count > 80000);
}

TEST_CASE("Knapsack: random instances of up to 20 items agree with trying every choice", "[unit]") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    const std::size_t count = 1 + random() % 20;
    Instance instance;
    for (std::size_t i = 0; i < count; ++i) {
      instance.weights.push_back(random() % 31);
      instance.values.push_back(static_cast<std::int64_t>(random() % 31));
    }
    instance.capacity = random() % 200;
    std::vector<std::uint64_t> weight(std::size_t{1} << count, 0);
    std::vector<std::int64_t> value(std::size_t{1} << count, 0);
    std::int64_t best = 0;
    for (std::size_t set = 1; set < weight.size(); ++set) {
      const auto item = static_cast<std::size_t>(__builtin_ctzll(set));
      weight[set] = weight[set & (set - 1)] + instance.weights[item];
      value[set] = value[set & (set - 1)] + instance.values[item];
      best = weight[set] <= instance.capacity ? std::max(best, value[set]) : best;
    }
    CHECK(Optimum(instance) == best);
    CheckOptimal(instance);
  }
}

TEST_CASE("Knapsack: every class of the literature agrees with the integer oracle", "[unit]") {
  std::mt19937_64 random(2);
  for (const std::string& name : ClassNames()) {
    for (const std::int64_t range : {10, 100, 1000}) {
      for (const std::size_t count : {5, 30, 200}) {
        INFO(name << " n=" << count << " R=" << range);
        const Instance instance = Generate(name, count, range, random);
        if (instance.capacity * count < 100'000'000) {  // "similar" has weights of 100 R
          CheckOptimal(instance);
        }
      }
    }
  }
}

TEST_CASE("Knapsack: known instances have their known answers", "[unit]") {
  struct Known {
    std::vector<std::uint64_t> weights;
    std::vector<std::int64_t> values;
    std::uint64_t capacity;
    std::int64_t value;
  };
  const std::vector<std::uint64_t> weights = {21, 10, 26, 4, 5, 35, 7, 24, 38, 4, 33, 14};
  const std::vector<std::int64_t> values = {3, 6, 28, 27, 5, 16, 6, 36, 28, 4, 53, 37};
  const std::vector<Known> all = {
      {{1, 1}, {1, 2}, 1, 2},
      {{1, 2}, {1, 2}, 2, 2},
      {{1, 1, 1}, {1, 1, 1}, 1, 1},
      {{0, 1, 1}, {1, 1, 2}, 1, 3},
      {{25, 5, 22, 26}, {25, 2, 27, 28}, 72, 57},
      {{2, 19, 25, 2, 14, 3, 9, 7}, {47, 21, 12, 8, 12, 45, 24, 2}, 29, 128},
      {{1, 1}, {16777216, 1}, 2, 16777217},
      {{2, 1}, {343597383680, 1}, 3, 343597383681},
      {{47, 37, 36, 25}, {23, 12, 31, 14}, 102, 57},
      {{14, 3, 54, 39}, {22, 41, 48, 29}, 70, 92},
      {{1, 10}, {2, 10}, 10, 10},
      {{}, {}, 7, 0},
      {{5, 6}, {1, 1}, 4, 0},
      {weights, values, 20, 64},
      {weights, values, 60, 126},
      {weights, values, 100, 170},
      {weights, values, 150, 219},
  };
  for (const Known& known : all) {
    const Instance instance{known.weights, known.values, known.capacity};
    CHECK(Solved(instance).value == known.value);
    CheckOptimal(instance);
  }
}

TEST_CASE("Knapsack: a thousand equal items and room for one take the most valuable", "[unit]") {
  std::mt19937_64 random(3);
  Instance instance{std::vector<std::uint64_t>(1024, 1), {}, 1};
  for (std::size_t i = 0; i < 1024; ++i) {
    instance.values.push_back(static_cast<std::int64_t>(random() % 100000));
  }
  CheckOptimal(instance);
  CHECK(Solved(instance).weight == 1);
}

TEST_CASE("Knapsack: twenty thousand unit items within 64 MiB of states", "[unit]") {
  Instance instance{std::vector<std::uint64_t>(20000, 1), {}, 10000};
  for (std::int64_t i = 1; i <= 20000; ++i) {
    instance.values.push_back(i);
  }
  const KnapsackAnswer answer = Solved(instance);
  CHECK(answer.value == 150005000);
  CHECK(answer.taken[9999] == 0);
  CHECK(answer.taken[10000] == 1);
}

TEST_CASE("Knapsack: the classes with large numbers are proved optimal", "[unit]") {
  std::mt19937_64 random(4);
  for (const char* const name : {"uncorrelated", "weakly", "strongly", "inverse", "almost",
                                 "subset_sum", "even_subset", "similar", "span_strongly"}) {
    INFO(name);
    CHECK(Solved(Generate(name, 1000, 1000000, random)).status == KnapsackStatus::kOptimal);
  }
  for (const char* const name : {"reload_noisy", "flops"}) {
    INFO(name);
    CHECK(Solved(GeneratePlanner(name, 1000, random)).status == KnapsackStatus::kOptimal);
  }
}

TEST_CASE("Knapsack: list core and dense tables agree where no oracle fits", "[unit]") {
  std::mt19937_64 random(5);
  for (const std::string& name : ClassNames()) {
    INFO(name);
    const Instance instance = Generate(name, 300, 300, random);
    const KnapsackAnswer list = Solved(instance, With(KnapsackMethod::kList));
    const KnapsackAnswer dense = Solved(instance, With(KnapsackMethod::kDense));
    CHECK(dense.status == KnapsackStatus::kOptimal);
    CHECK(list.value <= dense.value);
    CHECK(list.bound >= dense.value);
    CHECK(list.status == KnapsackStatus::kOptimal);
  }
}

TEST_CASE("Knapsack: tiny limits never give a wrong bound or a value above the optimum", "[unit]") {
  std::mt19937_64 random(6);
  std::uint64_t limited = 0;
  for (int round = 0; round < 3; ++round) {
    for (const std::string& name : ClassNames()) {
      const Instance instance = Generate(name, 60, 300, random);
      const std::int64_t optimum = Optimum(instance);
      for (const std::size_t bytes : {0, 10'000, 100'000}) {
        for (const std::uint64_t work : {50, 2000, 1'000'000}) {
          KnapsackOptions options;
          options.method = KnapsackMethod::kList;
          options.memory_limit_bytes = bytes;
          options.work_limit = work;
          const KnapsackAnswer answer = Solved(instance, options);
          INFO(name << " bytes " << bytes << " work " << work);
          CHECK(answer.value <= optimum);
          CHECK(answer.bound >= optimum);
          limited += answer.status == KnapsackStatus::kLimit;
        }
      }
    }
  }
  CHECK(limited > 50);
}

TEST_CASE("Knapsack: a tolerance is kept and reported", "[unit]") {
  std::mt19937_64 random(7);
  for (const std::string& name : ClassNames()) {
    const Instance instance = Generate(name, 100, 300, random);
    const std::int64_t optimum = Optimum(instance);
    for (const double gap : {1e-6, 1e-3, 0.05}) {
      KnapsackOptions options;
      options.relative_gap = gap;
      const KnapsackAnswer answer = Solved(instance, options);
      INFO(name << " gap " << gap);
      CHECK(answer.bound >= optimum);
      CHECK(static_cast<double>(answer.bound - answer.value) <=
            gap * static_cast<double>(answer.bound));
      CHECK(answer.status != KnapsackStatus::kLimit);
    }
    KnapsackOptions options;
    options.absolute_gap = 10;
    CHECK(Solved(instance, options).value >= optimum - 10);
  }
}

TEST_CASE("Knapsack: order, scale and spare capacity change nothing; more room never costs",
          "[unit]") {
  std::mt19937_64 random(8);
  for (const std::string& name : ClassNames()) {
    INFO(name);
    const Instance instance = Generate(name, 80, 1000, random);
    const KnapsackAnswer answer = Solved(instance);
    CHECK(Solved(instance).taken == answer.taken);

    std::vector<std::size_t> order(instance.weights.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    Instance other{{}, {}, instance.capacity};
    for (const std::size_t i : order) {
      other.weights.push_back(instance.weights[i]);
      other.values.push_back(instance.values[i]);
    }
    CHECK(Solved(other).value == answer.value);

    other = instance;
    for (std::uint64_t& weight : other.weights) {
      weight *= 4096;
    }
    other.capacity = instance.capacity * 4096 + 4095;
    CHECK(Solved(other).value == answer.value);

    other = instance;
    other.capacity += random() % 100;
    CHECK(Solved(other).value >= answer.value);
  }
}

TEST_CASE("Knapsack: pins are kept, and pinning an item out that was not taken costs nothing",
          "[unit]") {
  std::mt19937_64 random(9);
  const Instance instance = Generate("weakly", 60, 100, random);
  const KnapsackAnswer free = Solved(instance);
  std::vector<KnapsackPin> pins(60, KnapsackPin::kFree);
  std::size_t in = 60;
  for (std::size_t i = 0; i < 60; ++i) {
    if (free.taken[i] == 0) {
      pins[i] = KnapsackPin::kOut;
      in = i;
    }
  }
  KnapsackProblem problem = Problem(instance);
  problem.pins = pins;
  auto answer = SolveKnapsack(problem, {});
  REQUIRE(answer.ok());
  CHECK(answer->value == free.value);

  pins.assign(60, KnapsackPin::kFree);
  pins[in] = KnapsackPin::kIn;
  answer = SolveKnapsack(problem, {});
  REQUIRE(answer.ok());
  CHECK(answer->taken[in] == 1);
  CHECK(answer->weight <= instance.capacity);
  CHECK(answer->status == KnapsackStatus::kOptimal);
  Instance rest = instance;
  rest.capacity -= instance.weights[in];
  rest.values[in] = 0;
  CHECK(answer->value == Optimum(rest) + instance.values[in]);

  pins.assign(60, KnapsackPin::kIn);
  answer = SolveKnapsack(problem, {});
  REQUIRE_FALSE(answer.ok());
  CHECK_THAT(answer.error().message, Contains("weights["));
}

TEST_CASE("Knapsack: numbers at the limits do not overflow", "[unit]") {
  std::mt19937_64 random(10);
  for (int round = 0; round < 30; ++round) {
    Instance instance;
    for (int i = 0; i < 60; ++i) {
      instance.weights.push_back((std::uint64_t{1} << 50) + random() % (std::uint64_t{1} << 50));
      instance.values.push_back(static_cast<std::int64_t>((std::uint64_t{1} << 54) +
                                                          random() % (std::uint64_t{1} << 54)));
    }
    SetCapacity(instance, 0.5);
    KnapsackOptions options;
    options.work_limit = 200'000;
    const KnapsackAnswer answer = Solved(instance, options);
    CHECK(answer.value > 0);
  }
  const std::uint64_t half = std::uint64_t{1} << 56;
  Instance instance{{half - 1, half - 2, 1}, {1, std::int64_t{1} << 60, 5}, half - 1};
  CHECK(Solved(instance).value == (std::int64_t{1} << 60) + 5);
  instance.capacity = ~std::uint64_t{0};
  CHECK(Solved(instance).value == (std::int64_t{1} << 60) + 6);
  instance.capacity = half - 1;
  instance.weights[2] = ~std::uint64_t{0} >> 1;  // never fits, so its weight counts nowhere
  CHECK(Solved(instance).value == std::int64_t{1} << 60);
}

TEST_CASE("Knapsack: bad input is refused by list and index", "[unit]") {
  const auto message = [](const KnapsackProblem& problem, const KnapsackOptions& options = {}) {
    const auto answer = SolveKnapsack(problem, options);
    REQUIRE_FALSE(answer.ok());
    CHECK(answer.error().code == ErrorCode::kInvalidArgument);
    return answer.error().message;
  };
  const std::uint64_t big = kKnapsackWeightLimit / 2;
  const std::vector<std::uint64_t> weights = {1, 2, 3};
  const std::vector<std::uint64_t> heavy = {1, big, big};
  const std::vector<std::int64_t> values = {1, 2, 3};
  const std::vector<std::int64_t> negative = {1, 2, -3};
  const std::vector<std::int64_t> valuable = {1, kKnapsackValueLimit / 2, kKnapsackValueLimit / 2};
  const std::vector<std::int64_t> two = {1, 2};
  const std::vector<KnapsackPin> pins = {KnapsackPin::kFree, static_cast<KnapsackPin>(9),
                                         KnapsackPin::kIn};
  CHECK(message({weights, two, {}, 4}) == "3 weights but 2 values");
  CHECK(message({weights, negative, {}, 4}) == "values[2] is negative");
  CHECK_THAT(message({heavy, values, {}, big}), Contains("weights[2]"));
  CHECK_THAT(message({weights, valuable, {}, 4}), Contains("values[2]"));
  CHECK_THAT(message({weights, values, pins, 4}), Contains("pins[1]"));
  CHECK(message({weights, values, std::span(pins).first(2), 4}) == "3 weights but 2 pins");
  KnapsackOptions options;
  options.relative_gap = -1;
  CHECK_THAT(message({weights, values, {}, 4}, options), Contains("gap"));
  options.relative_gap = 0;
  options.work_limit = 0;
  CHECK_THAT(message({weights, values, {}, 4}, options), Contains("work_limit"));
}

TEST_CASE("Knapsack: dense tables beyond the memory limit are refused with both numbers",
          "[unit]") {
  const Instance instance{{3000001, 3000002}, {5, 6}, 4000000};
  KnapsackOptions options = With(KnapsackMethod::kDense);
  options.memory_limit_bytes = 1 << 20;
  const auto answer = SolveKnapsack(Problem(instance), options);
  REQUIRE_FALSE(answer.ok());
  CHECK(answer.error().code == ErrorCode::kLimit);
  CHECK_THAT(answer.error().message, Contains("1048576"));
  options.memory_limit_bytes = 64 << 20;
  CHECK(Solved(instance, options).value == 6);
}

}  // namespace
}  // namespace modelcache
