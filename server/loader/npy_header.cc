// A scanner of the one literal that numpy writes: strings without escapes, True and False, tuples
// of decimal numbers.
#include "server/loader/npy_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/checked_math.h"
#include "server/loader/named_dtype.h"
#include "server/loader/source_file.h"

namespace modelcache {
namespace {

// Without the sign of the byte order in front.
constexpr std::array<NamedDtype, 14> kDtypes = {{
    {"b1", Dtype::kBool},
    {"u1", Dtype::kUint8},
    {"i1", Dtype::kInt8},
    {"i2", Dtype::kInt16},
    {"i4", Dtype::kInt32},
    {"i8", Dtype::kInt64},
    {"u2", Dtype::kUint16},
    {"u4", Dtype::kUint32},
    {"u8", Dtype::kUint64},
    {"f2", Dtype::kFloat16},
    {"f4", Dtype::kFloat32},
    {"f8", Dtype::kFloat64},
    {"c8", Dtype::kComplex64},
    {"c16", Dtype::kComplex128},
}};

// '<' and '=' are this machine's order, '|' and none mean it; '>' changes nothing of single bytes.
std::optional<Dtype> DtypeOf(std::string_view descr) {
  constexpr std::string_view kOrders = "<=|>";
  const bool has_order = !descr.empty() && kOrders.find(descr.front()) != std::string_view::npos;
  const auto dtype = FindDtype(kDtypes, descr.substr(has_order ? 1 : 0));
  const bool swapped = has_order && descr.front() == '>';
  return dtype && swapped && DtypeBits(*dtype) > 8 ? std::nullopt : dtype;
}

class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  Result<TensorSpec> Parse() {
    if (!Skip('{')) {
      return Unreadable();
    }
    while (!Skip('}')) {
      if (auto read = ReadMember(); !read.ok()) {
        return std::move(read).error();
      }
      if (!Skip(',') && Peek() != '}') {
        return Unreadable();
      }
    }
    if (Peek() != '\0' || !descr_ || !fortran_order_ || !shape_) {
      return Unreadable();
    }
    return Build();
  }

 private:
  // The next character that is no space; 0 at the end.
  char Peek() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) {
      ++at_;
    }
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Skip(char expected) {
    const bool found = Peek() == expected && at_ < text_.size();
    at_ += found ? 1 : 0;
    return found;
  }

  bool Skip(std::string_view word) {
    (void)Peek();
    const bool found = text_.substr(at_, word.size()) == word;
    at_ += found ? word.size() : 0;
    return found;
  }

  std::optional<std::string_view> ReadString() {
    const char quote = Peek();
    const std::size_t end = quote == '\'' || quote == '"' ? text_.find(quote, at_ + 1) : text_.npos;
    if (end == text_.npos) {
      return std::nullopt;
    }
    const std::string_view content = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return content.find('\\') == content.npos ? std::optional(content) : std::nullopt;
  }

  Result<void> ReadMember() {
    const auto name = ReadString();
    if (!name || !Skip(':')) {
      return Unreadable();
    }
    const bool known = *name == "descr" || *name == "fortran_order" || *name == "shape";
    const bool twice = (*name == "descr" && descr_) || (*name == "shape" && shape_) ||
                       (*name == "fortran_order" && fortran_order_);
    if (!known || twice) {
      return Error{ErrorCode::kBadFile,
                   "its header has the member " + Quoted(*name) +
                       (known ? " twice" : ", which is none of descr, fortran_order and shape"),
                   0};
    }
    if (*name == "descr") {
      return ReadDescr();
    }
    return *name == "shape" ? ReadShape() : ReadOrder();
  }

  Result<void> ReadDescr() {
    if (Peek() == '[' || Peek() == '(') {
      return Error{ErrorCode::kUnsupported,
                   "structured dtype " + Quoted(text_.substr(at_)) + " has no tensor type", 0};
    }
    descr_ = ReadString();
    return descr_ ? Result<void>() : Result<void>(Unreadable());
  }

  Result<void> ReadOrder() {
    fortran_order_ = Skip("True");
    return *fortran_order_ || Skip("False") ? Result<void>() : Result<void>(Unreadable());
  }

  // A tuple: one number needs a comma behind it.
  Result<void> ReadShape() {
    shape_.emplace();
    bool comma = true;
    const bool opened = Skip('(');
    while (opened && !Skip(')')) {
      auto number = comma ? ReadNumber() : Result<std::int64_t>(Unreadable());
      if (!number.ok()) {
        return std::move(number).error();
      }
      shape_->push_back(*number);
      comma = Skip(',');
    }
    return opened && (comma || shape_->size() > 1) ? Result<void>() : Result<void>(Unreadable());
  }

  Result<std::int64_t> ReadNumber() {
    (void)Peek();
    const std::size_t first = at_;
    std::uint64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const auto shifted = CheckedMul(value, 10);
      const auto next =
          shifted ? CheckedAdd(*shifted, static_cast<unsigned>(text_[at_] - '0')) : shifted;
      if (!next || *next > static_cast<std::uint64_t>(INT64_MAX)) {
        return Error{ErrorCode::kBadFile, "a shape beyond 64 bits in " + Quoted(text_), 0};
      }
      value = *next;
    }
    if (at_ == first) {
      return Unreadable();
    }
    (void)Skip('L');  // how Python 2 wrote long numbers
    return static_cast<std::int64_t>(value);
  }

  [[nodiscard]] Result<TensorSpec> Build() const {
    const auto dtype = DtypeOf(*descr_);
    if (!dtype) {
      return Error{ErrorCode::kUnsupported, "dtype " + Quoted(*descr_) + " has no tensor type", 0};
    }
    if (shape_->size() > kMaxDimensions) {
      return Error{ErrorCode::kBadFile,
                   "more than " + std::to_string(kMaxDimensions) + " dimensions", 0};
    }
    TensorSpec tensor;
    tensor.dtype = *dtype;
    tensor.shape = *shape_;
    if (*fortran_order_) {
      const std::vector<std::int64_t> reversed(shape_->rbegin(), shape_->rend());
      tensor.stride = ContiguousStride(reversed);
      std::reverse(tensor.stride.begin(), tensor.stride.end());
    } else {
      tensor.stride = ContiguousStride(tensor.shape);
    }
    return tensor;
  }

  [[nodiscard]] Error Unreadable() const {
    return Error{ErrorCode::kBadFile,
                 "an unreadable header " + Quoted(text_) + " (byte " + std::to_string(at_) + ")",
                 0};
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::optional<std::string_view> descr_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<std::int64_t>> shape_;
};

}  // namespace

Result<TensorSpec> ParseNpyHeader(std::string_view text) { return HeaderParser(text).Parse(); }

}  // namespace modelcache
