// Input, stack, memo and plain values.
#include "server/loader/pickle_machine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/utf8.h"
#include "server/loader/source_file.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxNodes = 4U << 20U;
constexpr std::size_t kMaxLongBytes = 256;  // decimal conversion is quadratic

// Nodes every document starts with, so that the most frequent values cost nothing; the fourth is
// the empty tuple.
constexpr PickleRef kNoneRef = 0;
constexpr PickleRef kFalseRef = 1;
constexpr PickleRef kTrueRef = 2;

PickleNode MakeNode(PickleKind kind, std::int64_t integer = 0) {
  PickleNode node;
  node.kind = kind;
  node.integer = integer;
  return node;
}

// Decimal digits of a two's complement number of any length.
std::string DecimalText(std::string_view little_endian) {
  const bool negative = (static_cast<unsigned char>(little_endian.back()) & 0x80U) != 0;
  std::vector<unsigned> digits{0};  // least significant first
  unsigned carry_in = negative ? 1 : 0;
  std::string magnitude(little_endian);
  for (char& byte : magnitude) {
    if (negative) {
      const unsigned value = (static_cast<unsigned char>(byte) ^ 0xFFU) + carry_in;
      byte = static_cast<char>(value & 0xFFU);
      carry_in = value >> 8U;
    }
  }
  for (auto byte = magnitude.rbegin(); byte != magnitude.rend(); ++byte) {
    unsigned carry = static_cast<unsigned char>(*byte);
    for (unsigned& digit : digits) {
      carry += digit * 256;
      digit = carry % 10;
      carry /= 10;
    }
    for (; carry > 0; carry /= 10) {
      digits.push_back(carry % 10);
    }
  }
  std::string text = negative ? "-" : "";
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    text += static_cast<char>('0' + *digit);
  }
  return text;
}

}  // namespace

PickleMachine::PickleMachine(std::string_view bytes) : bytes_(bytes) {
  document_.nodes.push_back(MakeNode(PickleKind::kNone));
  document_.nodes.push_back(MakeNode(PickleKind::kBool, 0));
  document_.nodes.push_back(MakeNode(PickleKind::kBool, 1));
  document_.nodes.push_back(MakeNode(PickleKind::kTuple));
}

Result<PickleDocument> PickleMachine::Run() {
  while (!stopped_) {
    opcode_at_ = at_;
    std::uint8_t opcode = 0;
    if (!TakeNumber(opcode)) {
      return std::move(error_);
    }
    const Handler handler = Handlers()[opcode];
    if (handler == nullptr) {
      (void)Fail("opcode " + Quoted(std::string(1, static_cast<char>(opcode))) +
                     " is not one of protocols 2 to 5 that checkpoints use",
                 ErrorCode::kUnsupported);
      return std::move(error_);
    }
    if (!handler(*this)) {
      return std::move(error_);
    }
  }
  document_.consumed_bytes = at_;
  return std::move(document_);
}

bool PickleMachine::Fail(std::string message, ErrorCode code) {
  error_ =
      Error{code, "pickle at byte " + std::to_string(opcode_at_) + ": " + std::move(message), 0};
  return false;
}

bool PickleMachine::Take(std::uint64_t size_bytes, std::string_view& out) {
  if (size_bytes > bytes_.size() - at_) {
    return Fail("needs " + std::to_string(size_bytes) + " more bytes, " +
                std::to_string(bytes_.size() - at_) + " are left");
  }
  out = bytes_.substr(at_, size_bytes);
  at_ += size_bytes;
  return true;
}

template <typename Number>
bool PickleMachine::TakeNumber(Number& out) {
  std::string_view raw;
  if (!Take(sizeof out, raw)) {
    return false;
  }
  std::memcpy(&out, raw.data(), sizeof out);
  return true;
}

template <typename Length>
bool PickleMachine::TakeCounted(std::string_view& out) {
  Length length = 0;
  return TakeNumber(length) && Take(length, out);
}

bool PickleMachine::TakeLine(std::string_view& out) {
  const std::size_t end = bytes_.find('\n', at_);
  if (end == std::string_view::npos) {
    return Fail("a line without end");
  }
  out = bytes_.substr(at_, end - at_);
  at_ = end + 1;
  return true;
}

bool PickleMachine::Push(PickleRef ref) {
  stack_.push_back(ref);
  return true;
}

// Counts the text and items of a new node. What is appended later needs no count: each value was
// pushed by bytes of its own.
bool PickleMachine::Charge(const PickleNode& made) {
  return budget_.Charge(made.text.size() + made.items.size() * sizeof(PickleRef), at_) ||
         Fail(budget_.Complaint(at_));
}

bool PickleMachine::PushNew(PickleNode node) {
  if (document_.nodes.size() >= kMaxNodes) {
    return Fail("more than " + std::to_string(kMaxNodes) + " values");
  }
  if (!Charge(node)) {
    return false;
  }
  document_.nodes.push_back(std::move(node));
  return Push(static_cast<PickleRef>(document_.nodes.size() - 1));
}

bool PickleMachine::PushText(PickleKind kind, std::string_view text) {
  PickleNode node = MakeNode(kind);
  node.text = text;
  return PushNew(std::move(node));
}

bool PickleMachine::PushInt(std::int64_t value) {
  return PushNew(MakeNode(PickleKind::kInt, value));
}

// Takes the `count` uppermost values off the stack into a new container.
bool PickleMachine::PushItems(PickleKind kind, std::size_t count) {
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (count > stack_.size() - floor) {
    return Fail("takes " + std::to_string(count) + " values off a stack of " +
                std::to_string(stack_.size() - floor));
  }
  PickleNode node = MakeNode(kind);
  node.items.assign(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
  stack_.resize(stack_.size() - count);
  return PushNew(std::move(node));
}

bool PickleMachine::Top(PickleRef& out) {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
    return Fail("takes a value off an empty stack");
  }
  out = stack_.back();
  return true;
}

bool PickleMachine::Pop(PickleRef& out) {
  if (!Top(out)) {
    return false;
  }
  stack_.pop_back();
  return true;
}

bool PickleMachine::PopMark(std::size_t& count) {
  if (marks_.empty()) {
    return Fail("looks for a mark, but there is none");
  }
  count = stack_.size() - marks_.back();
  marks_.pop_back();
  return true;
}

bool PickleMachine::Remember(std::uint64_t key) {
  PickleRef ref = kNoRef;
  if (!Top(ref)) {
    return false;
  }
  memo_[key] = ref;
  return true;
}

bool PickleMachine::Recall(std::uint64_t key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) {
    return Fail("recalls memo " + std::to_string(key) + ", which was never set");
  }
  return Push(found->second);
}

template <typename Key>
bool PickleMachine::TakeKey() {
  Key key = 0;
  const bool taken = TakeNumber(key);
  key_ = key;
  return taken;
}

template <typename Number>
bool PickleMachine::OpInt() {
  Number value = 0;
  return TakeNumber(value) && PushInt(value);
}

template <typename Length>
bool PickleMachine::OpLong() {
  std::string_view raw;
  return TakeCounted<Length>(raw) && PushLong(raw);
}

template <typename Length>
bool PickleMachine::OpText(PickleKind kind) {
  std::string_view text;
  if (!TakeCounted<Length>(text)) {
    return false;
  }
  if (kind == PickleKind::kText && !IsUtf8(text)) {
    return Fail("text " + Quoted(text) + " is not UTF-8");
  }
  return PushText(kind, text);
}

bool PickleMachine::PushLong(std::string_view little_endian) {
  if (little_endian.size() > kMaxLongBytes) {
    return Fail("an integer of " + std::to_string(little_endian.size()) + " bytes, limit " +
                std::to_string(kMaxLongBytes));
  }
  if (little_endian.empty()) {
    return PushInt(0);
  }
  if (little_endian.size() > sizeof(std::int64_t)) {
    return PushText(PickleKind::kBigInt, DecimalText(little_endian));
  }
  // Sign extension to 64 bits.
  const bool negative = (static_cast<unsigned char>(little_endian.back()) & 0x80U) != 0;
  std::uint64_t value = negative ? ~std::uint64_t{0} : 0;
  std::memcpy(&value, little_endian.data(), little_endian.size());
  return PushInt(static_cast<std::int64_t>(value));
}

bool PickleMachine::OpProto() {
  std::uint8_t protocol = 0;
  if (!TakeNumber(protocol)) {
    return false;
  }
  return (protocol >= 2 && protocol <= 5) ||
         Fail("protocol " + std::to_string(protocol) + ", 2 to 5 are read",
              ErrorCode::kUnsupported);
}

bool PickleMachine::OpFrame() {
  std::uint64_t length = 0;  // frames only help streaming readers
  return TakeNumber(length);
}

bool PickleMachine::OpStop() {
  stopped_ = true;
  return Pop(document_.root);
}

bool PickleMachine::OpFloat() {
  std::string_view raw;
  if (!Take(sizeof(double), raw)) {
    return false;
  }
  std::uint64_t bits = 0;
  std::memcpy(&bits, raw.data(), sizeof bits);
  PickleNode node = MakeNode(PickleKind::kFloat);
  node.number = std::bit_cast<double>(__builtin_bswap64(bits));
  return PushNew(std::move(node));
}

bool PickleMachine::OpMemoize() { return Remember(memo_.size()); }

bool PickleMachine::OpPop() {
  // POP of a bare mark drops the mark.
  if (!marks_.empty() && marks_.back() == stack_.size()) {
    marks_.pop_back();
    return true;
  }
  PickleRef ignored = kNoRef;
  return Pop(ignored);
}

bool PickleMachine::OpPopMark() {
  std::size_t count = 0;
  if (!PopMark(count)) {
    return false;
  }
  stack_.resize(stack_.size() - count);
  return true;
}

bool PickleMachine::OpDup() {
  PickleRef top = kNoRef;
  return Top(top) && Push(top);
}

void PickleMachine::AddStackHandlers(Table& table) {
  using M = PickleMachine;
  table[0x80] = [](M& m) { return m.OpProto(); };
  table[0x95] = [](M& m) { return m.OpFrame(); };
  table['.'] = [](M& m) { return m.OpStop(); };
  table['0'] = [](M& m) { return m.OpPop(); };
  table['1'] = [](M& m) { return m.OpPopMark(); };
  table['2'] = [](M& m) { return m.OpDup(); };
  table[0x94] = [](M& m) { return m.OpMemoize(); };
  table['q'] = [](M& m) { return m.TakeKey<std::uint8_t>() && m.Remember(m.key_); };
  table['r'] = [](M& m) { return m.TakeKey<std::uint32_t>() && m.Remember(m.key_); };
  table['h'] = [](M& m) { return m.TakeKey<std::uint8_t>() && m.Recall(m.key_); };
  table['j'] = [](M& m) { return m.TakeKey<std::uint32_t>() && m.Recall(m.key_); };
}

void PickleMachine::AddValueHandlers(Table& table) {
  using M = PickleMachine;
  table['N'] = [](M& m) { return m.Push(kNoneRef); };
  table[0x88] = [](M& m) { return m.Push(kTrueRef); };
  table[0x89] = [](M& m) { return m.Push(kFalseRef); };
  table['J'] = [](M& m) { return m.OpInt<std::int32_t>(); };
  table['K'] = [](M& m) { return m.OpInt<std::uint8_t>(); };
  table['M'] = [](M& m) { return m.OpInt<std::uint16_t>(); };
  table[0x8a] = [](M& m) { return m.OpLong<std::uint8_t>(); };
  table[0x8b] = [](M& m) { return m.OpLong<std::uint32_t>(); };
  table['G'] = [](M& m) { return m.OpFloat(); };
  table['X'] = [](M& m) { return m.OpText<std::uint32_t>(PickleKind::kText); };
  table[0x8c] = [](M& m) { return m.OpText<std::uint8_t>(PickleKind::kText); };
  table[0x8d] = [](M& m) { return m.OpText<std::uint64_t>(PickleKind::kText); };
  table['U'] = [](M& m) { return m.OpText<std::uint8_t>(PickleKind::kText); };
  table['T'] = [](M& m) { return m.OpText<std::uint32_t>(PickleKind::kText); };
  table['C'] = [](M& m) { return m.OpText<std::uint8_t>(PickleKind::kBytes); };
  table['B'] = [](M& m) { return m.OpText<std::uint32_t>(PickleKind::kBytes); };
  table[0x8e] = [](M& m) { return m.OpText<std::uint64_t>(PickleKind::kBytes); };
  table[0x96] = [](M& m) { return m.OpText<std::uint64_t>(PickleKind::kBytes); };
}

const PickleMachine::Table& PickleMachine::Handlers() {
  static const Table table = [] {
    Table filled{};
    AddStackHandlers(filled);
    AddValueHandlers(filled);
    AddContainerHandlers(filled);
    AddObjectHandlers(filled);
    return filled;
  }();
  return table;
}

Result<PickleDocument> ReadPickle(std::string_view bytes) { return PickleMachine(bytes).Run(); }

}  // namespace modelcache
