// A restricted pickle machine: turns a stream into plain nodes and executes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"

namespace modelcache {

using PickleRef = std::uint32_t;  // index into PickleDocument::nodes
inline constexpr PickleRef kNoRef = 0xFFFFFFFFU;

enum class PickleKind : std::uint8_t {
  kNone,
  kBool,    // integer is 0 or 1
  kInt,     // integer
  kBigInt,  // text holds the decimal digits: does not fit 64 bits
  kFloat,   // number
  kBytes,   // text
  kText,    // text, UTF-8 as far as the file has it
  kList,    // items
  kTuple,   // items
  kSet,     // items; set and frozenset
  kDict,    // items: key, value, key, value, …; text is its type: dict, OrderedDict, defaultdict
  kGlobal,  // text is "module.name": a name that was looked up nowhere
  kCall,    // items: callable, arguments; a call or construction that was not made
  kPersistent,  // items: the persistent id
};

// One value. Several nodes may refer to one: then it is the same object.
struct PickleNode {
  PickleKind kind = PickleKind::kNone;
  PickleRef state = kNoRef;  // what BUILD would have given the object
  std::int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<PickleRef> items;
};

// The nodes of one pickle. References may form cycles.
struct PickleDocument {
  std::vector<PickleNode> nodes;
  PickleRef root = kNoRef;
  std::size_t consumed_bytes = 0;  // up to and with STOP

  [[nodiscard]] const PickleNode& At(PickleRef ref) const { return nodes[ref]; }
};

// Reads one pickle of protocol 2 to 5 from the start of `bytes`. Memory is bounded by the length of
// the stream, copies of values included (ByteBudget); depth costs nothing.
// Errors: kBadFile with the byte position: damaged stream, a limit met, or a callable that runs
// code (named, e.g. posix.system), whether or not the stream would call it; kUnsupported (opcodes
// of other protocols, extension codes, out-of-band buffers).
Result<PickleDocument> ReadPickle(std::string_view bytes);

// True for names that run code, reach files, processes or the network, or hand out such names.
bool RunsCode(std::string_view module, std::string_view name);

}  // namespace modelcache
