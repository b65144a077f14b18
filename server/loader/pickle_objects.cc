// Containers, names, and the calls that are noted instead of made.
#include <array>
#include <utility>

#include "server/loader/pickle_machine.h"
#include "server/loader/source_file.h"

namespace modelcache {
namespace {

constexpr PickleRef kEmptyTupleRef = 3;

// Latin-1 text, as _codecs.encode gets it, back to the bytes it stands for. False when a character
// is outside of Latin-1.
bool Latin1Bytes(std::string_view utf8, std::string& bytes) {
  for (std::size_t i = 0; i < utf8.size(); ++i) {
    const auto lead = static_cast<unsigned char>(utf8[i]);
    if (lead < 0x80) {
      bytes += static_cast<char>(lead);
      continue;
    }
    const bool two = (lead == 0xC2 || lead == 0xC3) && i + 1 < utf8.size();
    if (!two) {
      return false;
    }
    bytes +=
        static_cast<char>((lead & 0x03U) << 6U | (static_cast<unsigned char>(utf8[++i]) & 0x3FU));
  }
  return true;
}

}  // namespace

bool PickleMachine::AppendTo(std::size_t count) {
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() - floor <= count) {
    return Fail("appends to nothing");
  }
  const std::size_t first = stack_.size() - count;
  PickleNode& target = Node(stack_[first - 1]);
  if (target.kind == PickleKind::kList || target.kind == PickleKind::kSet) {
    target.items.insert(target.items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first),
                        stack_.end());
  } else if (target.kind != PickleKind::kCall) {  // an opaque object may be a list: dropped
    return Fail("appends to something that is no list");
  }
  stack_.resize(first);
  return true;
}

bool PickleMachine::SetItemsOf(std::size_t count) {
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (count % 2 != 0) {
    return Fail("sets items from an odd number of values: " + std::to_string(count));
  }
  if (stack_.size() - floor <= count) {
    return Fail("sets items of nothing");
  }
  const std::size_t first = stack_.size() - count;
  PickleNode& target = Node(stack_[first - 1]);
  if (target.kind == PickleKind::kDict) {
    target.items.insert(target.items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first),
                        stack_.end());
  } else if (target.kind != PickleKind::kCall) {  // an opaque object may be a dict: dropped
    return Fail("sets items of something that is no dict");
  }
  stack_.resize(first);
  return true;
}

bool PickleMachine::OpDict() {
  std::size_t count = 0;
  if (!PopMark(count)) {
    return false;
  }
  if (count % 2 != 0) {
    return Fail("makes a dict of an odd number of values: " + std::to_string(count));
  }
  if (!PushItems(PickleKind::kDict, count)) {
    return false;
  }
  Node(stack_.back()).text = "dict";
  return true;
}

bool PickleMachine::PushGlobal(std::string_view module, std::string_view name) {
  if (RunsCode(module, name)) {
    const std::string shown(module == "__builtin__" ? "builtins" : module);
    return Fail("refused: it names " + shown + "." + std::string(name) + ", which can run code");
  }
  return PushText(PickleKind::kGlobal, std::string(module) + "." + std::string(name));
}

bool PickleMachine::OpGlobal() {
  std::string_view module;
  std::string_view name;
  return TakeLine(module) && TakeLine(name) && PushGlobal(module, name);
}

bool PickleMachine::OpStackGlobal() {
  PickleRef name = kNoRef;
  PickleRef module = kNoRef;
  if (!Pop(name) || !Pop(module)) {
    return false;
  }
  if (Node(name).kind != PickleKind::kText || Node(module).kind != PickleKind::kText) {
    return Fail("a name that is not text");
  }
  const std::string module_text = Node(module).text;
  const std::string name_text = Node(name).text;
  return PushGlobal(module_text, name_text);
}

bool PickleMachine::OpInst() {
  std::string_view module;
  std::string_view name;
  std::size_t count = 0;
  if (!TakeLine(module) || !TakeLine(name) || !PushGlobal(module, name)) {
    return false;
  }
  const PickleRef callable = stack_.back();
  stack_.pop_back();
  if (!PopMark(count) || !PushItems(PickleKind::kTuple, count)) {
    return false;
  }
  PickleRef arguments = kNoRef;
  return Pop(arguments) && Construct(callable, arguments);
}

// Pairs of a dict, or of a list of two-element tuples, into `dict`.
bool PickleMachine::FillPairs(PickleRef source, PickleNode& dict) {
  const PickleNode& from = Node(source);
  if (from.kind == PickleKind::kDict) {
    dict.items = from.items;
    return true;
  }
  if (from.kind != PickleKind::kList && from.kind != PickleKind::kTuple) {
    return false;
  }
  for (const PickleRef pair : from.items) {
    const PickleNode& node = Node(pair);
    if ((node.kind != PickleKind::kTuple && node.kind != PickleKind::kList) ||
        node.items.size() != 2) {
      return false;
    }
    dict.items.insert(dict.items.end(), node.items.begin(), node.items.end());
  }
  return true;
}

// Containers of the standard library become what they are. False: not one of them.
bool PickleMachine::BuiltinCall(const std::string& callable,
                                const std::vector<PickleRef>& arguments, PickleNode& out) {
  if (callable == "collections.OrderedDict") {
    out.kind = PickleKind::kDict;
    out.text = "OrderedDict";
    return arguments.empty() || (arguments.size() == 1 && FillPairs(arguments[0], out));
  }
  if (callable == "collections.defaultdict") {
    out.kind = PickleKind::kDict;
    out.text = "defaultdict";
    return arguments.size() < 2 || (arguments.size() == 2 && FillPairs(arguments[1], out));
  }
  const bool set = callable == "builtins.set" || callable == "builtins.frozenset" ||
                   callable == "__builtin__.set" || callable == "__builtin__.frozenset";
  if (set && arguments.size() <= 1) {
    out.kind = PickleKind::kSet;
    if (arguments.empty()) {
      return true;
    }
    const PickleNode& from = Node(arguments[0]);
    out.items = from.items;
    return from.kind == PickleKind::kList || from.kind == PickleKind::kTuple;
  }
  if (callable == "_codecs.encode" && !arguments.empty()) {
    out.kind = PickleKind::kBytes;
    return Node(arguments[0]).kind == PickleKind::kText &&
           Latin1Bytes(Node(arguments[0]).text, out.text);
  }
  if ((callable == "builtins.bytes" || callable == "__builtin__.bytes") && arguments.empty()) {
    out.kind = PickleKind::kBytes;  // how protocol 2 writes b""
    return true;
  }
  return false;
}

bool PickleMachine::Construct(PickleRef callable, PickleRef arguments) {
  if (Node(arguments).kind != PickleKind::kTuple) {
    return Fail("a call whose arguments are no tuple");
  }
  PickleNode made;
  if (Node(callable).kind == PickleKind::kGlobal) {
    if (BuiltinCall(Node(callable).text, Node(arguments).items, made)) {
      return PushNew(std::move(made));
    }
    if (!Charge(made)) {  // a call that copies before it finds a fault costs the same
      return false;
    }
  }
  PickleNode call;
  call.kind = PickleKind::kCall;
  call.items = {callable, arguments};
  return PushNew(std::move(call));
}

bool PickleMachine::OpReduce() {
  PickleRef arguments = kNoRef;
  PickleRef callable = kNoRef;
  return Pop(arguments) && Pop(callable) && Construct(callable, arguments);
}

bool PickleMachine::OpNewObject() { return OpReduce(); }

bool PickleMachine::OpNewObjectEx() {
  PickleRef keywords = kNoRef;
  return Pop(keywords) && OpReduce();
}

bool PickleMachine::OpBuild() {
  PickleRef state = kNoRef;
  PickleRef target = kNoRef;
  if (!Pop(state) || !Top(target)) {
    return false;
  }
  Node(target).state = state;
  return true;
}

bool PickleMachine::OpPersistent() { return PushItems(PickleKind::kPersistent, 1); }

void PickleMachine::AddContainerHandlers(Table& table) {
  using M = PickleMachine;
  table['('] = [](M& m) {
    m.marks_.push_back(m.stack_.size());
    return true;
  };
  table[')'] = [](M& m) { return m.Push(kEmptyTupleRef); };
  table['t'] = [](M& m) {
    std::size_t count = 0;
    return m.PopMark(count) && m.PushItems(PickleKind::kTuple, count);
  };
  table[0x85] = [](M& m) { return m.PushItems(PickleKind::kTuple, 1); };
  table[0x86] = [](M& m) { return m.PushItems(PickleKind::kTuple, 2); };
  table[0x87] = [](M& m) { return m.PushItems(PickleKind::kTuple, 3); };
  table[']'] = [](M& m) { return m.PushItems(PickleKind::kList, 0); };
  table['l'] = [](M& m) {
    std::size_t count = 0;
    return m.PopMark(count) && m.PushItems(PickleKind::kList, count);
  };
  table['a'] = [](M& m) { return m.AppendTo(1); };
  table['e'] = [](M& m) {
    std::size_t count = 0;
    return m.PopMark(count) && m.AppendTo(count);
  };
  table['}'] = [](M& m) { return m.PushText(PickleKind::kDict, "dict"); };
  table['d'] = [](M& m) { return m.OpDict(); };
  table['s'] = [](M& m) { return m.SetItemsOf(2); };
  table['u'] = [](M& m) {
    std::size_t count = 0;
    return m.PopMark(count) && m.SetItemsOf(count);
  };
  table[0x8f] = [](M& m) { return m.PushItems(PickleKind::kSet, 0); };
  table[0x90] = table['e'];
  table[0x91] = [](M& m) {
    std::size_t count = 0;
    return m.PopMark(count) && m.PushItems(PickleKind::kSet, count);
  };
}

void PickleMachine::AddObjectHandlers(Table& table) {
  using M = PickleMachine;
  table['c'] = [](M& m) { return m.OpGlobal(); };
  table['i'] = [](M& m) { return m.OpInst(); };
  table[0x93] = [](M& m) { return m.OpStackGlobal(); };
  table['R'] = [](M& m) { return m.OpReduce(); };
  table[0x81] = [](M& m) { return m.OpNewObject(); };
  table[0x92] = [](M& m) { return m.OpNewObjectEx(); };
  table['b'] = [](M& m) { return m.OpBuild(); };
  table['Q'] = [](M& m) { return m.OpPersistent(); };
}

}  // namespace modelcache
