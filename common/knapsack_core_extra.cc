// The list core: partners outside the core for better choices, and what happens when memory ends.
#include <algorithm>
#include <functional>
#include <tuple>

#include "common/knapsack_core.h"

namespace modelcache::knapsack {
namespace {

constexpr std::size_t kNearest = 256;  // outside items tried on each side

}  // namespace

// The most valuable state that leaves at least `weight` free: the last one, as values rise.
const ListCore::State* ListCore::BestFor(std::int64_t weight) const {
  const auto after =
      std::partition_point(states_.begin(), states_.end(),
                           [weight](const State& state) { return state.residual >= weight; });
  return after == states_.begin() ? nullptr : &*std::prev(after);
}

// Every item outside the core with its best state.
void ListCore::PairSingles() {
  const auto consider = [this](std::size_t position, std::int64_t weight) {
    const State* partner = BestFor(weight);
    if (partner != nullptr) {
      const State together = Flipped(*partner, position);
      if (together.value + order_.base_value > best_.value) {
        Record(together, static_cast<std::uint32_t>(position), kNone);
      }
    }
  };
  for (std::size_t i = right_; i < order_.items.size(); ++i) {
    consider(i, order_.items[i].weight);
  }
  for (std::size_t i = 0; i < left_; ++i) {
    consider(i, -order_.items[i].weight);
  }
  budget_.work += left_ + (order_.items.size() - right_);
}

// Exchanges of an item outside on the left for one outside on the right, each with its best state:
// both sorted, one pass. On lists of one ratio (equal cost per byte) this finds the last unit.
void ListCore::PairSwaps() {
  struct Swap {
    std::int64_t weight;
    std::int64_t value;
    std::uint32_t out;
    std::uint32_t in;
  };
  const std::size_t first = left_ > kNearest ? left_ - kNearest : 0;
  const std::size_t last = std::min(order_.items.size(), right_ + kNearest);
  if ((left_ - first) * (last - right_) > 8 * states_.size()) {
    return;  // would cost more than the list itself; a longer list comes here again
  }
  std::vector<Swap> swaps;
  swaps.reserve((left_ - first) * (last - right_));
  for (std::size_t out = first; out < left_; ++out) {
    for (std::size_t in = right_; in < last; ++in) {
      swaps.push_back({order_.items[in].weight - order_.items[out].weight,
                       order_.items[in].value - order_.items[out].value,
                       static_cast<std::uint32_t>(out), static_cast<std::uint32_t>(in)});
    }
  }
  std::sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) {
    return std::tie(a.weight, b.value, a.out, a.in) < std::tie(b.weight, a.value, b.out, b.in);
  });
  budget_.work += 4 * swaps.size();
  std::size_t partners = states_.size();  // states before this one leave enough
  for (const Swap& swap : swaps) {
    while (partners > 0 && states_[partners - 1].residual < swap.weight) {
      --partners;
    }
    if (partners == 0) {
      break;
    }
    State together = states_[partners - 1];
    together.residual -= swap.weight;
    together.value += swap.value;
    if (together.value + order_.base_value > best_.value) {
      Record(together, swap.out, swap.in);
    }
  }
}

// Keeps the most promising states and remembers the best bound among the others.
void ListCore::LimitStates(std::size_t keep) {
  std::vector<std::int64_t> bounds(states_.size());
  std::transform(states_.begin(), states_.end(), bounds.begin(),
                 [this](const State& state) { return UpperBound(state); });
  std::vector<std::int64_t> ranked(bounds);
  const auto middle = ranked.begin() + static_cast<std::ptrdiff_t>(keep);
  std::nth_element(ranked.begin(), middle, ranked.end(), std::greater<>());
  const std::int64_t threshold = *middle;  // the best of those that go
  dropped_ = std::max(dropped_, threshold);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (bounds[i] > threshold) {
      states_[kept++] = states_[i];
    }
  }
  states_.resize(kept);
}

// Between steps: the next one adds at most one node per state. Trails that stay long although
// dead ones are gone cost states.
void ListCore::MakeRoomForTrails() {
  const std::size_t limit = 4 * state_limit_;
  if (nodes_.size() + states_.size() <= limit) {
    return;
  }
  CollectTrails();
  while (nodes_.size() > limit / 2 && states_.size() > 1) {
    LimitStates(states_.size() / 2);
    CollectTrails();
  }
}

// Drops the nodes no state reaches. Parents come before their children, so one pass from the end
// marks and one from the start moves.
void ListCore::CollectTrails() {
  std::vector<std::uint32_t> place(nodes_.size(), 0);
  for (const State& state : states_) {
    place[state.trail] = 1;
  }
  place[0] = 1;
  for (std::size_t i = nodes_.size(); i-- > 1;) {
    if (place[i] != 0) {
      place[nodes_[i].parent] = 1;
    }
  }
  std::uint32_t next = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (place[i] != 0) {
      nodes_[next] = {place[nodes_[i].parent], nodes_[i].position};
      place[i] = next++;
    }
  }
  nodes_.resize(next);
  for (State& state : states_) {
    state.trail = place[state.trail];
  }
}

}  // namespace modelcache::knapsack
