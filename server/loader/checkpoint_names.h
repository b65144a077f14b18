// Names for the tensors of a nested checkpoint: unlike in the file, a name is one text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/manifest.h"

namespace modelcache {

// How a value is reached from the container around it.
enum class StepKind : std::uint8_t {
  kText,       // by a text, the key of a dict
  kNumber,     // by an integer: an index, or the key of a dict
  kOther,      // by another key: its position in the dict
  kKey,        // it is itself the key at that position
  kAttribute,  // an attribute of the container
};

struct NameStep {
  StepKind kind = StepKind::kNumber;
  std::string_view text;     // kText and kAttribute: the name; kNumber: its digits, when a key
  std::size_t position = 0;  // kOther and kKey: in the dict; kNumber: the index
};

// Follows a walk through the checkpoint and remembers where its tensors are.
//
// A tensor is called by the steps to it, joined with dots ("model.layer.0.weight"). Where several
// tensors would get one name, each of them gets its steps as Python's subscripts instead:
// "['a']['b']" and "['a.b']". Such a name stands for one place alone, and the joined one for none:
// nobody gets another tensor than the one meant. Not synchronised.
class CheckpointNames {
 public:
  // The texts of steps must outlive this object.
  void Enter(const NameStep& step);
  // True when tensors were added since the Enter: then the step is kept, kStepBytes of memory.
  bool Leave();
  void AddTensor() { places_.push_back(current_); }

  // The joined steps so far.
  [[nodiscard]] const std::string& path() const { return path_; }

  // Names the tensors, in the order of AddTensor; each has its joined name already. Gives how many
  // bytes the new names take, or stops behind `most_bytes` with more than that.
  std::uint64_t Disambiguate(std::span<TensorSpec> tensors, std::uint64_t most_bytes) const;

  static constexpr std::size_t kStepBytes = 48;

 private:
  static constexpr std::uint32_t kRoot = 0xFFFFFFFFU;
  struct Kept {
    NameStep step;
    std::uint32_t parent = kRoot;
    std::uint32_t tensors_before = 0;
    std::uint32_t path_length = 0;
  };

  [[nodiscard]] std::string Subscripts(std::size_t tensor) const;

  std::vector<Kept> steps_;
  std::vector<std::uint32_t> places_;  // by tensor: its last step
  std::uint32_t current_ = kRoot;
  std::string path_;
};

}  // namespace modelcache
