// Doubles to integers: whole numbers, rounding outwards, what is refused.
#include "common/knapsack_numbers.h"

#include <cmath>
#include <limits>

#include "common/knapsack.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

using Doubles = std::vector<double>;

TEST_CASE("Knapsack numbers: quanta round weights up and the budget down, but not whole numbers",
          "[unit]") {
  const Doubles weights = {0.00005, 0.00015, 0.00025, 0.00035};
  const auto quanta = ToQuanta(weights, 0.00025, 1e-4);
  REQUIRE(quanta.ok());
  CHECK(quanta->weights == std::vector<std::uint64_t>{1, 2, 3, 4});
  CHECK(quanta->capacity == 2);
  for (std::uint64_t i = 0; i <= 20000; ++i) {
    for (const double number : {static_cast<double>(i) * 1e-4, static_cast<double>(i) / 10000}) {
      const auto one = ToQuanta(Doubles{number}, number, 1e-4);
      REQUIRE(one.ok());
      REQUIRE(one->weights[0] == i);
      REQUIRE(one->capacity == i);
    }
  }
}

TEST_CASE("Knapsack numbers: decimal fractions add up as written", "[unit]") {
  for (const auto& [weights, capacity] : std::vector<std::pair<Doubles, double>>{
           {{0.1, 0.2}, 0.3}, {{0.3, 0.2, 0.1}, 0.6}, {{0.123456789, 0.1}, 0.223456789}}) {
    const auto units = ToExactUnits(weights, capacity);
    REQUIRE(units.ok());
    std::uint64_t sum = 0;
    for (const std::uint64_t weight : units->weights) {
      sum += weight;
    }
    CHECK(sum == units->capacity);
  }
  const auto over = ToExactUnits(Doubles{0.5, 0.5000005}, 1.0);
  REQUIRE(over.ok());
  CHECK(over->weights[0] + over->weights[1] > over->capacity);
}

TEST_CASE("Knapsack numbers: other weights are rounded up, the capacity down", "[unit]") {
  const Doubles weights = {1.0 / 3, 1.0 / 7, std::sqrt(2.0), 1e-30, 0};
  const auto units = ToExactUnits(weights, 0.9);
  REQUIRE(units.ok());
  for (std::size_t i : {0, 1, 3}) {
    CHECK(static_cast<double>(units->weights[i]) >= weights[i] * units->units_per_one);
    CHECK(units->weights[i] > 0);
  }
  CHECK(static_cast<double>(units->capacity) <= 0.9 * units->units_per_one);
  CHECK(units->weights[2] > units->capacity);
  CHECK(units->weights[4] == 0);
  // What fits alone fits in units too, whatever the rounding.
  const auto same = ToExactUnits(Doubles{1.0 / 3, 1e-18, 100}, 1.0 / 3);
  REQUIRE(same.ok());
  CHECK(same->weights[0] <= same->capacity);
  CHECK(same->weights[0] + same->weights[1] > same->capacity);
}

TEST_CASE("Knapsack numbers: values keep all their bits where that is possible", "[unit]") {
  const auto whole = ToFixedPoint(Doubles{3e12, 1, 1, 0});
  REQUIRE(whole.ok());
  CHECK(whole->exact);
  CHECK(whole->values[0] == 3'000'000'000'000 * whole->values[1]);
  CHECK(whole->values[3] == 0);
  const auto spread = ToFixedPoint(Doubles{1e300, 1});
  REQUIRE(spread.ok());
  CHECK_FALSE(spread->exact);
  CHECK(spread->values[1] == 0);
  const auto huge = ToFixedPoint(Doubles(100, std::numeric_limits<double>::max()));
  REQUIRE(huge.ok());
  std::int64_t sum = 0;
  for (const std::int64_t value : huge->values) {
    sum += value;
  }
  CHECK(sum > (std::int64_t{1} << 50));
  CHECK(sum < kKnapsackValueLimit);
  const auto tiny = ToFixedPoint(Doubles{std::numeric_limits<double>::denorm_min(), 0});
  REQUIRE(tiny.ok());
  CHECK(tiny->values[0] > 0);
  CHECK(ToFixedPoint(Doubles{})->values.empty());
}

TEST_CASE("Knapsack numbers: NaN, infinity and negative numbers are refused by list and index",
          "[unit]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(ToFixedPoint(Doubles{1, nan}).error().message == "values[1] is NaN");
  CHECK(ToFixedPoint(Doubles{infinity}).error().message == "values[0] is infinite");
  CHECK(ToFixedPoint(Doubles{1, 2, -1}).error().message == "values[2] is negative");
  CHECK(ToExactUnits(Doubles{-1e-300}, 1).error().message == "weights[0] is negative");
  CHECK(ToQuanta(Doubles{0, nan}, 1, 1e-4).error().message == "weights[1] is NaN");
  CHECK(ToExactUnits(Doubles{1}, nan).error().message == "the capacity is NaN");
  CHECK(ToQuanta(Doubles{1}, -1, 1e-4).error().message == "the capacity is negative");
  CHECK(ToQuanta(Doubles{1}, 1e300, 1e-4).error().code == ErrorCode::kInvalidArgument);
  CHECK(ToQuanta(Doubles{1e300}, 1, 1e-4)->weights[0] > 10000);
}

}  // namespace
}  // namespace modelcache
