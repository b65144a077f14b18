// The JSON header of a safetensors file.
#include "server/loader/safetensors_header.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using modelcache::Require;
  auto header = modelcache::ParseSafetensorsHeader(modelcache::AsText(data, size));
  if (header.ok()) {
    for (const auto& entry : header->entries) {
      Require(entry.data_offsets.size() == 2, "an entry has two offsets");
    }
  } else {
    Require(header.error().code == modelcache::ErrorCode::kBadFile, "a bad header is kBadFile");
    Require(!header.error().message.empty(), "an error says something");
  }
  return 0;
}
