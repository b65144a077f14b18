// The list core: dynamic programming over undominated states, growing outwards from the split of
// an efficiency order. Internal to the knapsack solver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/knapsack_order.h"

namespace modelcache::knapsack {

// What the search may use, and has used; shared by all parts of one call.
struct Budget {
  std::uint64_t work_limit = 0;
  std::size_t memory_limit_bytes = 0;
  std::uint64_t work = 0;
  std::uint64_t peak_states = 0;

  [[nodiscard]] bool Spent() const { return work >= work_limit; }
};

enum class CoreEnd : std::uint8_t {
  kComplete,   // nothing better than the incumbent plus the tolerance exists, except where states
               // were dropped for memory: see bound()
  kCrowded,    // the list passed `crowded` states; Run() again goes on
  kWorkLimit,  // the budget is spent
};

// One search over one order. The order must outlive it.
class ListCore {
 public:
  // Looks for choices worth more than `incumbent`, and may miss those worth at most `tolerance`
  // more.
  ListCore(const Order& order, Choice incumbent, std::int64_t tolerance, Budget& budget);

  // Returns kCrowded once, when the list first passes `crowded` states.
  CoreEnd Run(std::size_t crowded);

  [[nodiscard]] const Choice& best() const { return best_; }

  // No choice (within the multiplier's cardinality) is worth more than the larger of this and
  // best().value + tolerance.
  [[nodiscard]] std::int64_t bound() const;

 private:
  // Relative to the base of the order. Lists are sorted by falling residual, strictly rising value.
  struct State {
    std::int64_t residual;  // capacity left; negative while too much is taken
    std::int64_t value;
    std::int32_t count;   // items more than the base has
    std::uint32_t trail;  // the last flip, in nodes_
  };

  struct Node {
    std::uint32_t parent;
    std::uint32_t position;
  };

  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  [[nodiscard]] State Flipped(const State& state, std::size_t position) const;
  [[nodiscard]] std::int64_t Missing(const State& state) const;
  [[nodiscard]] bool Survives(const State& state, std::size_t left, std::size_t right) const;
  [[nodiscard]] std::int64_t UpperBound(const State& state) const;
  void SkipHopeless();
  void GrowRight();
  void GrowLeft();
  bool Expand(std::size_t position, std::uint32_t previous);
  void Merge(std::size_t position);
  void Keep(const State& state, std::uint32_t position);
  void Record(const State& state, std::uint32_t position, std::uint32_t second);
  void PairSingles();
  void PairSwaps();
  [[nodiscard]] const State* BestFor(std::int64_t weight) const;
  void LimitStates(std::size_t keep);
  void MakeRoomForTrails();
  void CollectTrails();

  const Order& order_;
  Budget& budget_;
  std::int64_t tolerance_;
  Choice best_;
  std::int64_t goal_;     // best value relative to the base, plus the tolerance
  std::int64_t allowed_;  // cardinality relative to the base
  std::int64_t dropped_;  // relative bound of what memory made us drop
  std::size_t left_;      // items [left_, right_) are decided in the states
  std::size_t right_;
  std::size_t state_limit_;
  std::size_t paired_at_ = 0;  // length of the list when it was last paired
  bool was_crowded_ = false;
  std::vector<State> states_;
  std::vector<State> moved_;  // the states that flip the item at hand
  std::vector<State> next_;
  std::vector<Node> nodes_;
  std::int64_t last_value_ = 0;  // of the last undominated state in a merge
};

}  // namespace modelcache::knapsack
