// From the caller's lists to the search: checks, items that decide themselves, common divisors, and
// which method proves what.
#include "common/knapsack.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "common/checked_math.h"
#include "common/knapsack_core.h"
#include "common/knapsack_dense.h"
#include "common/knapsack_order.h"

namespace modelcache {
namespace {

using knapsack::Budget;
using knapsack::Choice;
using knapsack::CoreEnd;
using knapsack::Item;
using knapsack::ListCore;
using knapsack::Multiplier;
using knapsack::Order;

// A list this long is worth the search for a cardinality multiplier.
constexpr std::size_t kCrowded = 1000;
constexpr std::size_t kNever = ~std::size_t{0};
constexpr std::uint64_t kCellsPerWork = 32;
constexpr std::uint64_t kLeastWork = 100'000;  // of the list core before the dense tables

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

std::string At(const char* list, std::size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

std::optional<Error> CheckOptions(const KnapsackOptions& options) {
  if (options.absolute_gap < 0 || !(options.relative_gap >= 0 && options.relative_gap <= 1)) {
    return Invalid("a gap must not be negative, a relative one not above 1");
  }
  if (options.work_limit == 0 || options.threads == 0 || options.method > KnapsackMethod::kDense) {
    return Invalid("work_limit and threads must be above 0, and the method a known one");
  }
  return std::nullopt;
}

std::optional<Error> CheckLists(const KnapsackProblem& problem) {
  const std::size_t count = problem.weights.size();
  if (problem.values.size() != count) {
    return Invalid(std::to_string(count) + " weights but " + std::to_string(problem.values.size()) +
                   " values");
  }
  if (!problem.pins.empty() && problem.pins.size() != count) {
    return Invalid(std::to_string(count) + " weights but " + std::to_string(problem.pins.size()) +
                   " pins");
  }
  if (count > kKnapsackCountLimit) {
    return Error{ErrorCode::kLimit, "more than " + std::to_string(kKnapsackCountLimit) + " items",
                 0};
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (problem.values[i] < 0) {
      return Invalid(At("values", i) + " is negative");
    }
    if (!problem.pins.empty() && problem.pins[i] > KnapsackPin::kOut) {
      return Invalid(At("pins", i) + " is none of free, in, out");
    }
  }
  return std::nullopt;
}

// What is left to decide, in numbers without a common divisor.
struct Reduced {
  std::vector<Item> items;  // Item::index is the position in this vector
  std::vector<std::uint32_t> original;
  std::int64_t capacity = 0;
  std::int64_t value_unit = 1;
};

// The optimum of a reduced problem, and how well it is known.
class Search {
 public:
  Search(const Reduced& reduced, const KnapsackOptions& options)
      : reduced_(reduced), options_(options), taken_(reduced.items.size(), 0) {
    budget_.work_limit = options.work_limit;
    budget_.memory_limit_bytes = options.memory_limit_bytes;
  }

  void Run() {
    if (options_.method == KnapsackMethod::kDense) {
      Dense(reduced_.items, reduced_.capacity);
      bound_ = value_;
      return;
    }
    const Order order = MakeOrder(reduced_.items, reduced_.capacity, {});
    Adopt(order, GreedyChoice(order));
    bound_ = LinearBound(order);
    tolerance_ = Tolerance();
    if (!Closed()) {
      List(order);
    }
  }

  [[nodiscard]] const std::vector<std::uint8_t>& taken() const { return taken_; }
  [[nodiscard]] std::int64_t value() const { return value_; }
  [[nodiscard]] std::int64_t bound() const { return bound_; }
  [[nodiscard]] std::int64_t tolerance() const { return tolerance_; }
  [[nodiscard]] const Budget& budget() const { return budget_; }

 private:
  // Of the value in hand, which is below the bound.
  [[nodiscard]] std::int64_t Tolerance() const {
    const double part = options_.relative_gap * static_cast<double>(value_);
    return std::max(options_.absolute_gap / reduced_.value_unit, static_cast<std::int64_t>(part));
  }

  [[nodiscard]] bool Closed() const { return bound_ - value_ <= tolerance_; }

  void Adopt(const Order& order, const Choice& choice) {
    if (choice.value <= value_) {
      return;
    }
    value_ = choice.value;
    std::fill(taken_.begin(), taken_.end(), std::uint8_t{0});
    for (std::size_t i = 0; i < order.split; ++i) {
      taken_[order.items[i].index] = 1;
    }
    for (const std::uint32_t position : choice.flips) {
      taken_[order.items[position].index] ^= 1;
    }
  }

  // The list core on the plain order; when its list grows long, on the order that a cardinality
  // multiplier gives, if there is one; the dense tables when both end with a gap.
  void List(const Order& order) {
    const std::uint64_t dense_work = DenseWork(Undecided(order));
    const std::uint64_t all = budget_.work_limit;
    if (dense_work <= all / 2) {  // else leave the dense tables what they need
      budget_.work_limit = std::max(kLeastWork, dense_work);
    }
    ListCore core(order, {{}, value_}, tolerance_, budget_);
    CoreEnd end = core.Run(kCrowded);
    Take(order, core);
    std::optional<Order> priced;
    if (end == CoreEnd::kCrowded && !Closed()) {
      const std::optional<Multiplier> multiplier = FindMultiplier(order, value_);
      if (multiplier) {
        priced = MakeOrder(reduced_.items, reduced_.capacity, *multiplier);
        Priced(*priced);
      } else {
        core.Run(kNever);
        Take(order, core);
      }
    }
    budget_.work_limit = all;
    if (!Closed() && options_.method == KnapsackMethod::kAuto) {
      Finish(order, priced);
    }
  }

  void Priced(const Order& order) {
    Adopt(order, GreedyChoice(order));
    bound_ = std::max(value_, std::min(bound_, LinearBound(order)));
    if (!Closed()) {
      ListCore core(order, {{}, value_}, tolerance_, budget_);
      core.Run(kNever);
      Take(order, core);
    }
  }

  void Take(const Order& order, const ListCore& core) {
    Adopt(order, core.best());
    bound_ = std::max(value_, std::min(bound_, core.bound()));
  }

  // What an improvement on the value in hand leaves open, by the bounds of one or two orders.
  struct Rest {
    std::vector<Item> items;
    std::vector<std::uint8_t> decided;  // per item of the problem: 1 in, 0 out or open
    std::int64_t capacity = 0;
    std::int64_t weight_unit = 1;
    bool possible = true;  // false: no improvement exists
  };

  [[nodiscard]] Rest Undecided(const Order& order, const Order* second = nullptr) const {
    enum : std::uint8_t { kOpen, kIn, kOut };
    std::vector<std::uint8_t> state(reduced_.items.size(), kOpen);
    Rest rest;
    for (const Order* one : {&order, second}) {
      for (std::size_t i = 0; one != nullptr && i < one->items.size(); ++i) {
        if (!FlipCanReach(*one, i, value_ + tolerance_ + 1)) {
          const std::uint8_t now = i < one->split ? kIn : kOut;
          std::uint8_t& was = state[one->items[i].index];
          rest.possible = rest.possible && (was == kOpen || was == now);
          was = now;
        }
      }
    }
    rest.decided.resize(state.size(), 0);
    rest.capacity = reduced_.capacity;
    std::int64_t unit = 0;
    for (const Item& item : reduced_.items) {
      if (state[item.index] == kIn) {
        rest.decided[item.index] = 1;
        rest.capacity -= item.weight;
      } else if (state[item.index] == kOpen) {
        rest.items.push_back(item);
        unit = std::gcd(unit, item.weight);
      }
    }
    rest.possible = rest.possible && rest.capacity >= 0;
    rest.weight_unit = std::max<std::int64_t>(unit, 1);
    return rest;
  }

  // In the unit of the budget; the whole of it and more where the tables may not be used.
  [[nodiscard]] std::uint64_t DenseWork(const Rest& rest) const {
    if (!rest.possible) {
      return 0;
    }
    std::vector<Item> items = rest.items;
    const std::int64_t capacity = Divide(items, rest);
    if (knapsack::DenseBytes(items, capacity) > options_.memory_limit_bytes) {
      return kNever;
    }
    return knapsack::DenseCells(items, capacity) / kCellsPerWork;
  }

  static std::int64_t Divide(std::vector<Item>& items, const Rest& rest) {
    for (Item& item : items) {
      item.weight /= rest.weight_unit;
    }
    return rest.capacity / rest.weight_unit;
  }

  void Finish(const Order& order, const std::optional<Order>& priced) {
    Rest rest = Undecided(order, priced ? &*priced : nullptr);
    const std::uint64_t work = DenseWork(rest);
    if (work > options_.work_limit - std::min(options_.work_limit, budget_.work)) {
      return;
    }
    if (rest.possible) {
      const std::int64_t capacity = Divide(rest.items, rest);
      Dense(rest.items, capacity, &rest.decided);
    }
    bound_ = std::min(bound_, value_ + tolerance_);
  }

  // The optimum over `items`, with those that `decided` has in, if that is better.
  void Dense(const std::vector<Item>& items, std::int64_t capacity,
             const std::vector<std::uint8_t>* decided = nullptr) {
    budget_.work += knapsack::DenseCells(items, capacity) / kCellsPerWork;
    const std::vector<std::uint8_t> chosen =
        knapsack::SolveDense(items, capacity, options_.threads);
    std::vector<std::uint8_t> taken =
        decided != nullptr ? *decided : std::vector<std::uint8_t>(reduced_.items.size(), 0);
    for (std::size_t i = 0; i < items.size(); ++i) {
      taken[items[i].index] = chosen[i];
    }
    std::int64_t value = 0;
    for (const Item& item : reduced_.items) {
      value += taken[item.index] != 0 ? item.value : 0;
    }
    if (value > value_) {
      value_ = value;
      taken_ = std::move(taken);
    }
  }

  const Reduced& reduced_;
  const KnapsackOptions& options_;
  Budget budget_;
  std::vector<std::uint8_t> taken_;
  std::int64_t value_ = 0;
  std::int64_t bound_ = 0;
  std::int64_t tolerance_ = 0;
};

// Decides what decides itself, into an answer, and collects the rest.
class Reduction {
 public:
  Reduction(const KnapsackProblem& problem, std::vector<std::uint8_t>& taken)
      : problem_(problem),
        taken_(taken),
        capacity_(std::min(problem.capacity, kKnapsackWeightLimit)) {
    left_ = capacity_;
  }

  Result<Reduced> Run() {
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      if (Pin(i) == KnapsackPin::kIn) {
        if (problem_.weights[i] > left_) {
          return Invalid("the items pinned in are above the capacity, at " + At("weights", i));
        }
        left_ -= problem_.weights[i];
        taken_[i] = 1;
      }
    }
    weight_ = capacity_ - left_;
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      if (auto failure = Consider(i)) {
        return *failure;
      }
    }
    reduced_.capacity = static_cast<std::int64_t>(left_);
    return std::move(reduced_);
  }

 private:
  [[nodiscard]] KnapsackPin Pin(std::size_t i) const {
    return problem_.pins.empty() ? KnapsackPin::kFree : problem_.pins[i];
  }

  // Adds an item that may be taken, or is, to the sums, and to the rest unless it is decided.
  std::optional<Error> Consider(std::size_t i) {
    const bool open =
        Pin(i) == KnapsackPin::kFree && problem_.weights[i] <= left_ && problem_.values[i] > 0;
    if (taken_[i] == 0 && !open) {
      return std::nullopt;
    }
    if (problem_.values[i] >= kKnapsackValueLimit - value_) {
      return Invalid("the sum of the values passes 2^61, at " + At("values", i));
    }
    value_ += problem_.values[i];
    if (taken_[i] != 0) {
      return std::nullopt;
    }
    if (problem_.weights[i] >= kKnapsackWeightLimit - weight_) {
      return Invalid("the sum of the weights passes 2^57, at " + At("weights", i));
    }
    weight_ += problem_.weights[i];
    if (problem_.weights[i] == 0) {
      taken_[i] = 1;
      return std::nullopt;
    }
    reduced_.items.push_back({static_cast<std::int64_t>(problem_.weights[i]), problem_.values[i],
                              static_cast<std::uint32_t>(reduced_.items.size())});
    reduced_.original.push_back(static_cast<std::uint32_t>(i));
    return std::nullopt;
  }

  const KnapsackProblem& problem_;
  std::vector<std::uint8_t>& taken_;
  Reduced reduced_;
  std::uint64_t capacity_;
  std::uint64_t left_;
  std::uint64_t weight_ = 0;
  std::int64_t value_ = 0;
};

// True when all fit. Otherwise takes the common divisors out.
bool AllFitOrDivide(Reduced& reduced) {
  std::int64_t weight = 0;
  std::int64_t weight_unit = 0;
  std::int64_t value_unit = 0;
  for (const Item& item : reduced.items) {
    weight += item.weight;
    weight_unit = std::gcd(weight_unit, item.weight);
    value_unit = std::gcd(value_unit, item.value);
  }
  if (weight <= reduced.capacity) {
    return true;
  }
  reduced.capacity /= weight_unit;
  reduced.value_unit = value_unit;
  for (Item& item : reduced.items) {
    item.weight /= weight_unit;
    item.value /= value_unit;
  }
  return false;
}

void Total(const KnapsackProblem& problem, KnapsackAnswer& answer) {
  for (std::size_t i = 0; i < answer.taken.size(); ++i) {
    if (answer.taken[i] != 0) {
      answer.value += problem.values[i];
      answer.weight += problem.weights[i];
    }
  }
}

}  // namespace

Result<KnapsackAnswer> SolveKnapsack(const KnapsackProblem& problem,
                                     const KnapsackOptions& options) {
  for (const auto& failure : {CheckOptions(options), CheckLists(problem)}) {
    if (failure) {
      return *failure;
    }
  }
  KnapsackAnswer answer;
  answer.taken.resize(problem.weights.size(), 0);
  Result<Reduced> reduced = Reduction(problem, answer.taken).Run();
  if (!reduced.ok()) {
    return std::move(reduced).error();
  }
  if (AllFitOrDivide(*reduced)) {
    for (const std::uint32_t i : reduced->original) {
      answer.taken[i] = 1;
    }
    Total(problem, answer);
    answer.bound = answer.value;
    return answer;
  }
  if (options.method == KnapsackMethod::kDense &&
      knapsack::DenseBytes(reduced->items, reduced->capacity) > options.memory_limit_bytes) {
    return Error{ErrorCode::kLimit,
                 "the dense tables need " +
                     std::to_string(knapsack::DenseBytes(reduced->items, reduced->capacity)) +
                     " bytes, " + std::to_string(options.memory_limit_bytes) + " are allowed",
                 0};
  }
  Search search(*reduced, options);
  search.Run();
  for (std::size_t i = 0; i < reduced->items.size(); ++i) {
    answer.taken[reduced->original[i]] = search.taken()[i];
  }
  Total(problem, answer);
  answer.bound = answer.value + (search.bound() - search.value()) * reduced->value_unit;
  answer.work = search.budget().work;
  answer.peak_states = search.budget().peak_states;
  if (answer.bound > answer.value) {
    answer.status = search.bound() - search.value() <= search.tolerance()
                        ? KnapsackStatus::kWithinTolerance
                        : KnapsackStatus::kLimit;
  }
  return answer;
}

}  // namespace modelcache
