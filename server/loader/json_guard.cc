// Depth is limited while parsing: values of nlohmann::json are walked recursively later on.
#include "server/loader/json_guard.h"

#include <utility>

namespace modelcache {
namespace {

using Json = nlohmann::json;

// Builds the value like the library's own handler, but stops at the first fault and keeps its text.
class GuardedHandler : public nlohmann::detail::json_sax_dom_parser<Json> {
 public:
  GuardedHandler(Json& value, int max_depth)
      : nlohmann::detail::json_sax_dom_parser<Json>(value, false), max_depth_(max_depth) {}

  bool start_object(std::size_t length) {
    return Enter() && json_sax_dom_parser::start_object(length);
  }
  bool start_array(std::size_t length) {
    return Enter() && json_sax_dom_parser::start_array(length);
  }
  bool end_object() {
    --depth_;
    return json_sax_dom_parser::end_object();
  }
  bool end_array() {
    --depth_;
    return json_sax_dom_parser::end_array();
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*fault*/) {
    fault_ = "JSON error at byte " + std::to_string(position > 0 ? position - 1 : 0);
    return false;
  }

  [[nodiscard]] const std::string& fault() const { return fault_; }

 private:
  bool Enter() {
    if (++depth_ <= max_depth_) {
      return true;
    }
    fault_ = "JSON is nested deeper than " + std::to_string(max_depth_) + " levels";
    return false;
  }

  int max_depth_;
  int depth_ = 0;
  std::string fault_;
};

}  // namespace

Result<Json> ParseJson(std::string_view text, int max_depth) {
  // The parser takes a zero byte for the end of the text. JSON has none anywhere.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return Error{ErrorCode::kBadFile,
                 "JSON error at byte " + std::to_string(zero) + ": a zero byte", 0};
  }
  Json value;
  GuardedHandler handler(value, max_depth);
  if (Json::sax_parse(text, &handler)) {
    return value;
  }
  return Error{ErrorCode::kBadFile, handler.fault(), 0};
}

std::string DumpJson(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace modelcache
