// Metadata to quantizers and TorchScript records.
#include "client/description.h"

#include "tests/support/catch.h"

using namespace modelcache;

namespace {

bool Refused(const std::string& json) {
  Result<ModelDescription> parsed = ParseDescription(json, 2);
  return !parsed.ok() && parsed.error().code == ErrorCode::kCorrupt;
}

}  // namespace

TEST_CASE("Description: unknown members are left alone", "[unit]") {
  const auto parsed = ParseDescription(R"({"metadata": {"a": "b"}, "new": 1})", 0);
  REQUIRE(parsed.ok());
  CHECK_FALSE(parsed->script);
  CHECK(parsed->quantization.empty());
}

TEST_CASE("Description: quantizers per tensor and per channel", "[unit]") {
  const auto parsed = ParseDescription(
      R"({"quantization": {"3": {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 7},
          "4": {"scheme": "per_channel_affine_float_qparams", "scale": [1, 2], "zero_point": [0.5, 1], "axis": 1}}})",
      0);
  REQUIRE(parsed.ok());
  CHECK(parsed->quantization.at(3).scales == std::vector<double>{0.5});
  CHECK(parsed->quantization.at(3).zero_points == std::vector<double>{7});
  CHECK(parsed->quantization.at(4).per_channel);
  CHECK(parsed->quantization.at(4).float_qparams);
  CHECK(parsed->quantization.at(4).axis == 1);
}

TEST_CASE("Description: a TorchScript module", "[unit]") {
  const auto parsed = ParseDescription(
      R"({"torchscript": {"archive": 0, "records": {"0.storage": 1}, "extra_files": {"i.txt": "aGVsbG8="}}})",
      2);
  REQUIRE(parsed.ok());
  REQUIRE(parsed->script);
  CHECK(parsed->script->records[0].first == "0.storage");
  CHECK(parsed->script->records[0].second == 1);
  CHECK(parsed->script->extra_files[0].second == "hello");
}

TEST_CASE("Description: what does not fit is refused", "[unit]") {
  CHECK(Refused("[]"));
  CHECK(Refused("{"));
  CHECK(Refused(R"({"quantization": 1})"));
  CHECK(Refused(R"({"quantization": {"x": {"scale": 1, "zero_point": 0}}})"));
  CHECK(Refused(R"({"quantization": {"1": {"scale": 1}}})"));
  CHECK(Refused(R"({"quantization": {"1": {"scale": 1, "zero_point": 1e300}}})"));
  CHECK(Refused(R"({"quantization": {"1": {"scale": [1, 2], "zero_point": [0]}}})"));
  CHECK(Refused(R"({"torchscript": {"archive": 2, "records": {}}})"));
  CHECK(Refused(R"({"torchscript": {"archive": -1, "records": {}}})"));
  CHECK(Refused(R"({"torchscript": {"archive": 0}})"));
  CHECK(Refused(R"({"torchscript": {"archive": 0, "records": {"0.storage": 9}}})"));
  CHECK(Refused(R"({"torchscript": {"archive": 0, "records": {}, "extra_files": {"a": "?"}}})"));
}

TEST_CASE("Description: base64 of every length", "[unit]") {
  CHECK(DecodeBase64("") == "");
  CHECK(DecodeBase64("Zg==") == "f");
  CHECK(DecodeBase64("Zm8=") == "fo");
  CHECK(DecodeBase64("Zm9v") == "foo");
  CHECK_FALSE(DecodeBase64("Zg="));
  CHECK_FALSE(DecodeBase64("Z==="));
  CHECK_FALSE(DecodeBase64("Zg==Zg=="));
}
