// Dicts of a pickle as Python would hold them.
#pragma once

#include <vector>

#include "server/loader/pickle.h"

namespace modelcache {

struct DictPair {
  PickleRef key = kNoRef;
  PickleRef value = kNoRef;
};

// The pairs of a dict: a key that is set again keeps its place and gets the last value. Keys are
// the same by Python's rules (1, 1.0 and True are) for texts, bytes, numbers, None and names; other
// keys only when they are one object.
std::vector<DictPair> DictPairs(const PickleDocument& document, const PickleNode& dict);

}  // namespace modelcache
