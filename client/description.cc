// Metadata JSON to quantizers and TorchScript records.
#include "client/description.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "common/utf8.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

Error Corrupt(const std::string& member, const std::string& expected) {
  return Error{ErrorCode::kCorrupt, "metadata member '" + member + "': expected " + expected, 0};
}

std::optional<std::uint32_t> ParseNumber(const std::string& text) {
  if (text.empty() || text.size() > 9 ||
      text.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return static_cast<std::uint32_t>(std::stoul(text));
}

// Small enough to be turned into an integer.
bool IsExactNumber(const Json& json) {
  constexpr double kMost = 9007199254740992.0;
  return json.is_number() && std::abs(json.get<double>()) <= kMost;
}

// One number, or a list of numbers.
bool ReadNumbers(const Json& json, std::vector<double>& out) {
  if (IsExactNumber(json)) {
    out = {json.get<double>()};
    return true;
  }
  if (!json.is_array()) {
    return false;
  }
  for (const Json& item : json) {
    if (!IsExactNumber(item)) {
      return false;
    }
    out.push_back(item.get<double>());
  }
  return !out.empty();
}

std::optional<Quantizer> ReadQuantizer(const Json& json) {
  if (!json.is_object() || !json.contains("scale") || !json.contains("zero_point")) {
    return std::nullopt;
  }
  Quantizer quantization;
  const auto scheme = json.find("scheme");
  if (scheme != json.end() && scheme->is_string()) {
    const auto& name = scheme->get_ref<const std::string&>();
    quantization.per_channel = name.rfind("per_channel", 0) == 0;
    quantization.float_qparams = name == "per_channel_affine_float_qparams";
  }
  if (const auto axis = json.find("axis"); axis != json.end() && axis->is_number_integer()) {
    quantization.axis = axis->get<std::int64_t>();
  }
  if (!ReadNumbers(json["scale"], quantization.scales) ||
      !ReadNumbers(json["zero_point"], quantization.zero_points) ||
      quantization.scales.size() != quantization.zero_points.size() ||
      (!quantization.per_channel && quantization.scales.size() != 1)) {
    return std::nullopt;
  }
  return quantization;
}

Result<void> ReadQuantization(const Json& json, ModelDescription& description) {
  if (!json.is_object()) {
    return Corrupt("quantization", "an object");
  }
  for (const auto& [key, value] : json.items()) {
    const auto number = ParseNumber(key);
    auto quantizer = ReadQuantizer(value);
    if (!number || !quantizer) {
      return Corrupt("quantization." + key, "a tensor number with scales and zero points");
    }
    description.quantization[*number] = std::move(*quantizer);
  }
  return {};
}

bool IsStorage(const Json& json, std::uint32_t storage_count) {
  return json.is_number_unsigned() && json.get<std::uint64_t>() < storage_count;
}

Result<void> ReadExtraFiles(const Json& json, Script& script) {
  const auto files = json.find("extra_files");
  if (files == json.end()) {
    return {};
  }
  if (!files->is_object()) {
    return Corrupt("torchscript.extra_files", "an object");
  }
  for (const auto& [name, text] : files->items()) {
    auto bytes = text.is_string() ? DecodeBase64(text.get_ref<const std::string&>()) : std::nullopt;
    if (!bytes) {
      return Corrupt("torchscript.extra_files." + Printable(name), "base64 text");
    }
    script.extra_files.emplace_back(name, std::move(*bytes));
  }
  return {};
}

Result<void> ReadScript(const Json& json, std::uint32_t storage_count,
                        ModelDescription& description) {
  if (!json.is_object() || !json.contains("archive") ||
      !IsStorage(json["archive"], storage_count)) {
    return Corrupt("torchscript.archive", "a storage number");
  }
  Script script;
  script.archive = json["archive"].get<std::uint32_t>();
  const auto records = json.find("records");
  if (records == json.end() || !records->is_object()) {
    return Corrupt("torchscript.records", "an object");
  }
  for (const auto& [name, storage] : records->items()) {
    if (!IsStorage(storage, storage_count)) {
      return Corrupt("torchscript.records." + Printable(name), "a storage number");
    }
    script.records.emplace_back(name, storage.get<std::uint32_t>());
  }
  if (auto read = ReadExtraFiles(json, script); !read.ok()) {
    return read;
  }
  description.script = std::move(script);
  return {};
}

int DigitOf(char c) {
  if (c >= 'A' && c <= 'Z') {
    return c - 'A';
  }
  if (c >= 'a' && c <= 'z') {
    return c - 'a' + 26;
  }
  if (c >= '0' && c <= '9') {
    return c - '0' + 52;
  }
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

}  // namespace

Result<ModelDescription> ParseDescription(std::string_view metadata_json,
                                          std::uint32_t storage_count) {
  const Json json = Json::parse(metadata_json, nullptr, false);
  if (!json.is_object()) {
    return Corrupt("", "a JSON object");
  }
  ModelDescription description;
  if (const auto member = json.find("quantization"); member != json.end()) {
    if (auto read = ReadQuantization(*member, description); !read.ok()) {
      return std::move(read).error();
    }
  }
  if (const auto member = json.find("torchscript"); member != json.end()) {
    if (auto read = ReadScript(*member, storage_count, description); !read.ok()) {
      return std::move(read).error();
    }
  }
  return description;
}

std::optional<std::string> DecodeBase64(std::string_view text) {
  if (text.size() % 4 != 0) {
    return std::nullopt;
  }
  std::size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') {
    ++padding;
  }
  std::string bytes;
  std::uint32_t group = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool pad = i >= text.size() - padding;
    const int digit = pad ? 0 : DigitOf(text[i]);
    if (digit < 0) {
      return std::nullopt;
    }
    group = group << 6U | static_cast<std::uint32_t>(digit);
    if (i % 4 == 3) {
      for (const unsigned shift : {16U, 8U, 0U}) {
        bytes += static_cast<char>(group >> shift & 0xFFU);
      }
      group = 0;
    }
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace modelcache
