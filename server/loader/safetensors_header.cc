// A SAX handler that accepts exactly the header's form.
#include "server/loader/safetensors_header.h"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "server/loader/source_file.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

constexpr int kMaxIgnoredDepth = 64;

// Depth 1 holds names, depth 2 the members of one tensor (or of __metadata__), depth 3 its lists.
class HeaderHandler : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderHandler(SafetensorsHeader& header) : header_(header) {}

  bool null() override { return Scalar("null"); }
  bool boolean(bool value) override { return Scalar(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return Scalar(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Unsigned(value); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return Scalar(text);
  }
  bool binary(binary_t& /*value*/) override { return Fail("a binary value"); }

  bool string(string_t& value) override {
    if (Ignoring()) {
      return true;
    }
    if (depth_ == 2 && in_metadata_) {
      if (!header_.metadata.emplace(member_, value).second) {
        return Fail("__metadata__ has the key " + Quoted(member_) + " twice");
      }
      return true;
    }
    if (depth_ == 2 && member_ == "dtype") {
      entry_.dtype = value;
      return true;
    }
    return Unexpected("text " + Quoted(value));
  }

  bool start_object(std::size_t /*length*/) override {
    if (Ignoring() || depth_ >= 2) {
      return Nested("an object");
    }
    ++depth_;
    if (depth_ == 2) {
      in_metadata_ = name_ == "__metadata__";
      entry_ = SafetensorsEntry{name_, {}, {}, {}};
      members_.clear();
    }
    return true;
  }

  bool key(string_t& value) override {
    if (ignored_depth_ > 0) {
      return true;
    }
    if (depth_ == 1) {
      name_ = value;
      return names_.insert(name_).second || Fail("the name " + Quoted(name_) + " occurs twice");
    }
    member_ = value;
    if (in_metadata_) {
      return true;
    }
    return members_.insert(member_).second || Fail(Where() + ": member occurs twice");
  }

  bool end_object() override {
    if (ignored_depth_ > 0) {
      --ignored_depth_;
      return true;
    }
    --depth_;
    return depth_ != 1 || in_metadata_ || FinishEntry();
  }

  bool start_array(std::size_t /*length*/) override {
    if (!Ignoring() && depth_ == 2 && !in_metadata_ && list_ == nullptr) {
      list_ = member_ == "shape" ? &entry_.shape : nullptr;
      list_ = member_ == "data_offsets" ? &entry_.data_offsets : list_;
      if (list_ != nullptr) {
        return true;
      }
    }
    return Nested("a list");
  }

  bool end_array() override {
    if (ignored_depth_ > 0) {
      --ignored_depth_;
    } else {
      list_ = nullptr;
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::detail::exception& /*fault*/) override {
    return Fail("the header is not JSON: error at byte " +
                std::to_string(position > 0 ? position - 1 : 0) + " near " + Quoted(token));
  }

  [[nodiscard]] Error fault() const { return Error{ErrorCode::kBadFile, fault_, 0}; }

 private:
  // Members that the format does not define are skipped, as the reference does.
  [[nodiscard]] bool Ignoring() const {
    return ignored_depth_ > 0 ||
           (depth_ == 2 && !in_metadata_ && list_ == nullptr && member_ != "dtype" &&
            member_ != "shape" && member_ != "data_offsets");
  }

  bool Nested(const std::string& what) {
    if (!Ignoring()) {
      return Unexpected(what);
    }
    return ++ignored_depth_ <= kMaxIgnoredDepth ||
           Fail(Where() + ": nested deeper than " + std::to_string(kMaxIgnoredDepth) + " levels");
  }

  bool Unsigned(std::uint64_t value) {
    if (list_ == nullptr || ignored_depth_ > 0) {
      return Scalar(std::to_string(value));
    }
    list_->push_back(value);
    return true;
  }

  bool Scalar(const std::string& text) { return Ignoring() || Unexpected(text); }

  [[nodiscard]] std::string Where() const {
    return "tensor " + Quoted(name_) + ", member " + Quoted(member_);
  }

  bool Unexpected(const std::string& found) {
    if (depth_ == 0) {
      return Fail("the header must be an object, found " + found);
    }
    if (name_ == "__metadata__") {
      return Fail(depth_ == 1 ? "__metadata__ must be an object of strings, found " + found
                              : "__metadata__: the value of " + Quoted(member_) +
                                    " must be a string, found " + found);
    }
    if (depth_ == 1) {
      return Fail("tensor " + Quoted(name_) + " must be an object, found " + found);
    }
    const char* expected = member_ == "dtype" ? "text" : "a list of whole numbers from 0";
    return Fail(Where() + ": expected " + expected + ", found " + found);
  }

  bool FinishEntry() {
    for (const char* needed : {"dtype", "shape", "data_offsets"}) {
      if (members_.count(needed) == 0) {
        return Fail("tensor " + Quoted(name_) + " has no member '" + needed + "'");
      }
    }
    if (entry_.data_offsets.size() != 2) {
      return Fail("tensor " + Quoted(name_) + ": data_offsets must have 2 numbers, found " +
                  std::to_string(entry_.data_offsets.size()));
    }
    header_.entries.push_back(std::move(entry_));
    return true;
  }

  bool Fail(std::string message) {
    fault_ = std::move(message);
    return false;
  }

  SafetensorsHeader& header_;
  std::string fault_;
  int depth_ = 0;
  int ignored_depth_ = 0;
  bool in_metadata_ = false;
  std::string name_;
  std::string member_;
  SafetensorsEntry entry_;
  std::unordered_set<std::string> members_;
  std::unordered_set<std::string> names_;
  std::vector<std::uint64_t>* list_ = nullptr;
};

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text) {
  SafetensorsHeader header;
  HeaderHandler handler(header);
  // The parser takes a zero byte for the end of the text. JSON has none anywhere.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return Error{ErrorCode::kBadFile,
                 "the header is not JSON: a zero byte at byte " + std::to_string(zero) +
                     " (it is padded with spaces)",
                 0};
  }
  if (!Json::sax_parse(text, &handler)) {
    return handler.fault();
  }
  return header;
}

}  // namespace modelcache
