// Pickles and checkpoints, opcode by opcode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/loader/loader_harness.h"

namespace modelcache {

inline std::string PickledText(const std::string& text) {
  return "X" + LittleEndian(text.size(), 4) + text;
}

// An integer of 4 bytes.
inline std::string PickledInt(std::int32_t value) {
  return "J" + LittleEndian(static_cast<std::uint32_t>(value), 4);
}

// A memo of 4 bytes, so that it fits any number.
inline std::string Put(std::uint64_t key) { return "r" + LittleEndian(key, 4); }
inline std::string Get(std::uint64_t key) { return "j" + LittleEndian(key, 4); }

inline std::string Times(std::size_t count, const std::string& part) {
  std::string all;
  all.reserve(count * part.size());
  for (std::size_t i = 0; i < count; ++i) {
    all += part;
  }
  return all;
}

// A one-dimensional tensor of `count` elements over all of storage `key`.
inline std::string PickledTensor(const std::string& key, const std::string& type = "FloatStorage",
                                 std::int32_t count = 1) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + PickledText("storage") + "ctorch\n" + type +
         "\n" + PickledText(key) + PickledText("cpu") + PickledInt(count) + "tQ" + PickledInt(0) +
         PickledInt(count) + "\x85" + PickledInt(1) +
         "\x85\x89"
         "ccollections\nOrderedDict\n)RtR";
}

// A checkpoint of torch.save with these storages, named by their number.
inline std::string Checkpoint(const std::string& pickle, const std::vector<std::string>& storages) {
  std::vector<ZipEntry> entries{{"a/data.pkl", pickle}};
  for (std::size_t i = 0; i < storages.size(); ++i) {
    entries.push_back({"a/data/" + std::to_string(i), storages[i]});
  }
  return ZipFile(entries);
}

}  // namespace modelcache
