// What a client needs of a manifest's metadata: quantization and TorchScript.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/result.h"

namespace modelcache {

struct Quantizer {
  bool per_channel = false;
  bool float_qparams = false;
  std::int64_t axis = 0;
  std::vector<double> scales;       // one unless per_channel
  std::vector<double> zero_points;  // as many
};

struct Script {
  std::uint32_t archive = 0;
  std::vector<std::pair<std::string, std::uint32_t>> records;    // name, storage
  std::vector<std::pair<std::string, std::string>> extra_files;  // name, bytes
};

struct ModelDescription {
  std::map<std::uint32_t, Quantizer> quantization;  // by tensor number
  std::optional<Script> script;
};

// Reads the metadata of a model that has `storage_count` storages. Members it does not know are
// left alone. Errors: kCorrupt naming the member.
Result<ModelDescription> ParseDescription(std::string_view metadata_json,
                                          std::uint32_t storage_count);

// The bytes of base64 text (RFC 4648, padded); nothing when it is not that.
std::optional<std::string> DecodeBase64(std::string_view text);

}  // namespace modelcache
