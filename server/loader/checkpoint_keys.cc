// Keys that are one object are recognised before their text is looked at: the time is then bounded
// by the length of the stream, however often it refers to one long key.
#include "server/loader/checkpoint_keys.h"

#include <cmath>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace modelcache {
namespace {

struct Key {
  char kind = ' ';
  std::string_view text;

  bool operator==(const Key&) const = default;
};

struct HashKey {
  std::size_t operator()(const Key& key) const {
    return std::hash<std::string_view>()(key.text) * 31 + static_cast<unsigned char>(key.kind);
  }
};

class KeyMaker {
 public:
  explicit KeyMaker(const PickleDocument& document) : document_(document) {}

  Key Make(PickleRef ref) {
    const PickleNode& node = document_.At(ref);
    switch (node.kind) {
      case PickleKind::kNone:
        return {'n', {}};
      case PickleKind::kText:
        return {'t', node.text};
      case PickleKind::kBytes:
        return {'b', node.text};
      case PickleKind::kGlobal:
        return {'g', node.text};
      case PickleKind::kBool:
      case PickleKind::kInt:
        return {'i', Own(std::to_string(node.integer))};
      case PickleKind::kBigInt:
        return {'i', node.text};
      case PickleKind::kFloat:
        return OfFloat(node.number, ref);
      default:
        return {'r', Own(std::to_string(ref))};
    }
  }

 private:
  Key OfFloat(double value, PickleRef ref) {
    constexpr double kIntegersEnd = 9.2e18;
    if (std::isnan(value)) {  // equals nothing but itself
      return {'r', Own(std::to_string(ref))};
    }
    if (std::abs(value) < kIntegersEnd && std::trunc(value) == value) {
      return {'i', Own(std::to_string(static_cast<std::int64_t>(value)))};
    }
    return {'f', Own(std::string(reinterpret_cast<const char*>(&value), sizeof value))};
  }

  std::string_view Own(std::string text) { return owned_.emplace_back(std::move(text)); }

  const PickleDocument& document_;
  std::deque<std::string> owned_;
};

}  // namespace

std::vector<DictPair> DictPairs(const PickleDocument& document, const PickleNode& dict) {
  KeyMaker maker(document);
  std::vector<DictPair> pairs;
  std::unordered_map<PickleRef, std::size_t> by_object;
  std::unordered_map<Key, std::size_t, HashKey> by_key;
  for (std::size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const PickleRef key = dict.items[i];
    auto [place, added] = by_object.try_emplace(key, pairs.size());
    if (added) {
      place->second = by_key.try_emplace(maker.Make(key), pairs.size()).first->second;
    }
    if (place->second == pairs.size()) {
      pairs.push_back({key, kNoRef});
    }
    pairs[place->second].value = dict.items[i + 1];
  }
  return pairs;
}

}  // namespace modelcache
