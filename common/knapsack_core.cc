// The list core: merging, bounding and growing. Pairing and memory are in knapsack_core_extra.cc.
#include "common/knapsack_core.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace modelcache::knapsack {
namespace {

// Lists of this length are worth the search for partners outside the core.
constexpr std::size_t kPairFrom = 1000;

}  // namespace

ListCore::ListCore(const Order& order, Choice incumbent, std::int64_t tolerance, Budget& budget)
    : order_(order),
      budget_(budget),
      tolerance_(tolerance),
      best_(std::move(incumbent)),
      goal_(best_.value - order.base_value + tolerance),
      allowed_(order.multiplier.price == 0
                   ? 0
                   : order.multiplier.cardinality - static_cast<std::int64_t>(order.split)),
      dropped_(goal_),
      left_(order.split),
      right_(order.split),
      // Three lists (the merge of two full ones is written before it is cut) and four trail nodes
      // per state.
      state_limit_(std::clamp<std::size_t>(
          budget.memory_limit_bytes / (4 * sizeof(State) + 4 * sizeof(Node)), 16, 1U << 28)) {
  nodes_.push_back({0, kNone});
  const State base{order.residual, 0, 0, 0};
  if (order.base_value > best_.value) {
    Record(base, kNone, kNone);
  }
  states_.push_back(base);
}

CoreEnd ListCore::Run(std::size_t crowded) {
  SkipHopeless();
  while (!states_.empty()) {
    if (budget_.Spent()) {
      return CoreEnd::kWorkLimit;
    }
    if (!was_crowded_ && states_.size() > crowded) {
      was_crowded_ = true;
      return CoreEnd::kCrowded;
    }
    if (left_ == 0 && right_ == order_.items.size()) {
      break;
    }
    GrowRight();
    GrowLeft();
    if (states_.size() >= std::max(kPairFrom, 2 * paired_at_)) {
      paired_at_ = states_.size();
      PairSingles();
      PairSwaps();
    }
  }
  states_.clear();
  return CoreEnd::kComplete;
}

std::int64_t ListCore::bound() const {
  std::int64_t highest = dropped_;
  for (const State& state : states_) {
    highest = std::max(highest, UpperBound(state));
  }
  return std::min(std::max(highest, goal_) + order_.base_value,
                  std::max(best_.value, LinearBound(order_)));
}

ListCore::State ListCore::Flipped(const State& state, std::size_t position) const {
  const Item& item = order_.items[position];
  if (position >= order_.split) {
    return {state.residual - item.weight, state.value + item.value, state.count + 1, state.trail};
  }
  return {state.residual + item.weight, state.value - item.value, state.count - 1, state.trail};
}

// What a state must still win by filling or emptying to pass the goal.
std::int64_t ListCore::Missing(const State& state) const {
  return goal_ + 1 - state.value - order_.multiplier.price * (allowed_ - state.count);
}

// Whether a state can pass the goal with items left of `left` and from `right` on: the linear
// bound, as a comparison of products instead of a division.
bool ListCore::Survives(const State& state, std::size_t left, std::size_t right) const {
  const std::int64_t missing = Missing(state);
  if (state.residual >= 0) {
    if (missing <= 0) {
      return true;
    }
    if (right >= order_.items.size() || order_.Worth(right) <= 0) {
      return false;
    }
    return Wide{missing} * order_.items[right].weight <= Wide{state.residual} * order_.Worth(right);
  }
  if (left == 0) {
    return false;
  }
  return Wide{missing} * order_.items[left - 1].weight <=
         Wide{state.residual} * order_.Worth(left - 1);
}

// Relative to the base. States that nothing can mend have none: the goal stands for them.
std::int64_t ListCore::UpperBound(const State& state) const {
  const std::int64_t now = goal_ + 1 - Missing(state);
  if (state.residual >= 0) {
    if (right_ >= order_.items.size() || order_.Worth(right_) <= 0) {
      return now;
    }
    return now + MulDivFloor(state.residual, order_.Worth(right_), order_.items[right_].weight);
  }
  if (left_ == 0) {
    return goal_;
  }
  return now + MulDivFloor(state.residual, order_.Worth(left_ - 1), order_.items[left_ - 1].weight);
}

// An item that no choice worth having flips never enters the core.
void ListCore::SkipHopeless() {
  const std::int64_t goal = goal_ + 1 + order_.base_value;
  while (right_ < order_.items.size() && !FlipCanReach(order_, right_, goal)) {
    ++right_;
  }
  while (left_ > 0 && !FlipCanReach(order_, left_ - 1, goal)) {
    --left_;
  }
}

// Equal items enter one after another. The next of them concerns only states that flipped the one
// before, so the row ends as soon as there is none.
void ListCore::GrowRight() {
  std::uint32_t previous = kNone;
  while (right_ < order_.items.size()) {
    const std::size_t position = right_++;
    const bool same = right_ < order_.items.size() &&
                      order_.items[right_].weight == order_.items[position].weight &&
                      order_.items[right_].value == order_.items[position].value;
    const bool grew = Expand(position, previous);
    previous = static_cast<std::uint32_t>(position);
    if (!same) {
      break;
    }
    if (!grew) {
      const Item& item = order_.items[position];
      while (right_ < order_.items.size() && order_.items[right_].weight == item.weight &&
             order_.items[right_].value == item.value) {
        ++right_;
      }
      break;
    }
  }
  SkipHopeless();
}

void ListCore::GrowLeft() {
  std::uint32_t previous = kNone;
  while (left_ > 0) {
    const std::size_t position = --left_;
    const Item& item = order_.items[position];
    const auto same = [&] {
      return left_ > 0 && order_.items[left_ - 1].weight == item.weight &&
             order_.items[left_ - 1].value == item.value;
    };
    const bool grew = Expand(position, previous);
    previous = static_cast<std::uint32_t>(position);
    if (!same()) {
      break;
    }
    if (!grew) {
      while (same()) {
        --left_;
      }
      break;
    }
  }
  SkipHopeless();
}

// Lets every state flip the item, or only those whose last flip was `previous`. False when no new
// state came of it.
bool ListCore::Expand(std::size_t position, std::uint32_t previous) {
  moved_.clear();
  for (const State& state : states_) {
    if (previous == kNone || nodes_[state.trail].position == previous) {
      moved_.push_back(Flipped(state, position));
    }
  }
  budget_.work += states_.size() + moved_.size();
  const std::size_t nodes_before = nodes_.size();
  Merge(position);
  states_.swap(next_);
  budget_.peak_states = std::max<std::uint64_t>(budget_.peak_states, states_.size());
  const bool grew = nodes_.size() > nodes_before;
  if (states_.size() > state_limit_) {
    LimitStates(state_limit_ / 2);
  }
  MakeRoomForTrails();
  return grew;
}

// Both lists are sorted by falling residual; of equal residuals the more valuable goes first, so
// that a state is undominated exactly when it is worth more than all before it.
void ListCore::Merge(std::size_t position) {
  next_.clear();
  last_value_ = std::numeric_limits<std::int64_t>::min();
  const auto flip = static_cast<std::uint32_t>(position);
  auto old = states_.cbegin();
  auto moved = moved_.cbegin();
  while (old != states_.cend() && moved != moved_.cend()) {
    const bool old_first = old->residual != moved->residual ? old->residual > moved->residual
                                                            : old->value >= moved->value;
    if (old_first) {
      Keep(*old++, kNone);
    } else {
      Keep(*moved++, flip);
    }
  }
  while (old != states_.cend()) {
    Keep(*old++, kNone);
  }
  while (moved != moved_.cend()) {
    Keep(*moved++, flip);
  }
}

// Dominance looks at residual and value alone: whatever completes the dominated state completes
// the dominating one too, so a cardinality that every better choice keeps is kept there as well.
void ListCore::Keep(const State& state, std::uint32_t position) {
  if (state.value <= last_value_) {
    return;
  }
  last_value_ = state.value;
  if (state.residual >= 0 && state.value + order_.base_value > best_.value) {
    Record(state, position, kNone);
  }
  if (!Survives(state, left_, right_)) {
    return;
  }
  next_.push_back(state);
  if (position != kNone) {
    next_.back().trail = static_cast<std::uint32_t>(nodes_.size());
    nodes_.push_back({state.trail, position});
  }
}

// A better choice: the state, and up to two more flips. REQUIRES state to count them already.
void ListCore::Record(const State& state, std::uint32_t position, std::uint32_t second) {
  best_.value = state.value + order_.base_value;
  goal_ = state.value + tolerance_;
  best_.flips.clear();
  for (const std::uint32_t flip : {position, second}) {
    if (flip != kNone) {
      best_.flips.push_back(flip);
    }
  }
  for (std::uint32_t node = state.trail; node != 0; node = nodes_[node].parent) {
    best_.flips.push_back(nodes_[node].position);
  }
}

}  // namespace modelcache::knapsack
