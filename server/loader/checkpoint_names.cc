// Steps form a tree that only keeps the branches with tensors.
#include "server/loader/checkpoint_names.h"

#include <array>
#include <cstdio>
#include <unordered_map>
#include <utility>

namespace modelcache {
namespace {

// As Python writes it, in single quotes always.
std::string PythonText(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code == 0x7F) {
      std::array<char, 5> escape{};
      (void)std::snprintf(escape.data(), escape.size(), "\\x%02x", code);
      quoted += escape.data();
    } else {
      quoted += c == '\'' || c == '\\' ? "\\" : "";
      quoted += c;
    }
  }
  return quoted + "'";
}

// Digits of a key of a dict, else an index.
std::string NumberText(const NameStep& step) {
  return step.text.empty() ? std::to_string(step.position) : std::string(step.text);
}

// What a step adds to a joined name.
std::string JoinedText(const NameStep& step) {
  switch (step.kind) {
    case StepKind::kOther:
      return "key" + std::to_string(step.position);
    case StepKind::kKey:
      return "key";
    case StepKind::kNumber:
      return NumberText(step);
    default:
      return std::string(step.text);
  }
}

std::string Subscript(const NameStep& step) {
  switch (step.kind) {
    case StepKind::kText:
      return "[" + PythonText(step.text) + "]";
    case StepKind::kNumber:
      return "[" + NumberText(step) + "]";
    case StepKind::kOther:
      return "[key " + std::to_string(step.position) + "]";
    case StepKind::kKey:
      return "[key " + std::to_string(step.position) + " itself]";
    case StepKind::kAttribute:
      return ".attribute[" + PythonText(step.text) + "]";
  }
  return "";
}

}  // namespace

void CheckpointNames::Enter(const NameStep& step) {
  Kept kept{step, current_, static_cast<std::uint32_t>(places_.size()),
            static_cast<std::uint32_t>(path_.size())};
  current_ = static_cast<std::uint32_t>(steps_.size());
  steps_.push_back(kept);
  path_ += path_.empty() ? "" : ".";
  path_ += JoinedText(step);
}

bool CheckpointNames::Leave() {
  const Kept left = steps_[current_];
  const bool keep = places_.size() != left.tensors_before;
  if (!keep) {
    steps_.pop_back();  // steps inside of it were dropped before
  }
  path_.resize(left.path_length);
  current_ = left.parent;
  return keep;
}

std::string CheckpointNames::Subscripts(std::size_t tensor) const {
  std::vector<const NameStep*> steps;
  for (std::uint32_t at = places_[tensor]; at != kRoot; at = steps_[at].parent) {
    steps.push_back(&steps_[at].step);
  }
  std::string name;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    name += Subscript(**step);
  }
  return name;
}

std::uint64_t CheckpointNames::Disambiguate(std::span<TensorSpec> tensors,
                                            std::uint64_t most_bytes) const {
  std::unordered_map<std::string_view, std::size_t> joined;
  std::vector<char> ambiguous(tensors.size());
  std::vector<std::size_t> pending;
  const auto mark = [&](std::size_t tensor) {
    if (ambiguous[tensor] == 0) {
      ambiguous[tensor] = 1;
      pending.push_back(tensor);
    }
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const auto [first, added] = joined.emplace(tensors[i].name, i); !added) {
      mark(first->second);
      mark(i);
    }
  }
  std::uint64_t bytes = 0;
  std::vector<std::pair<std::size_t, std::string>> renamed;
  while (!pending.empty() && bytes <= most_bytes) {
    const std::size_t tensor = pending.back();
    pending.pop_back();
    std::string name = Subscripts(tensor);
    bytes += name.size();
    // A key may look like subscripts: then that key's tensor needs them too.
    if (const auto taken = joined.find(name); taken != joined.end()) {
      mark(taken->second);
    }
    renamed.emplace_back(tensor, std::move(name));
  }
  for (auto& [tensor, name] : renamed) {
    tensors[tensor].name = std::move(name);
  }
  return bytes;
}

}  // namespace modelcache
