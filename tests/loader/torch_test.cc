// Areas B, C and D12: checkpoints and TorchScript archives written by the real torch.
// The folder of fixtures comes in MODELCACHE_FIXTURES (make_fixtures.py writes it).
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "client/description.h"
#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

std::string Fixture(const std::string& name) {
  const char* folder = std::getenv("MODELCACHE_FIXTURES");
  return std::string(folder != nullptr ? folder : "fixtures") + "/" + name;
}

std::string FileBytesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<float> kSix = {0, 1, 2, 3, 4, 5};

LoadedModel MustLoad(const std::string& name) {
  auto model = Load(Fixture(name));
  INFO(name << ": " << (model.ok() ? "" : model.error().message));
  REQUIRE(model.ok());
  return std::move(*model);
}

Json MetadataOf(const LoadedModel& model) { return Json::parse(model.manifest().metadata_json()); }

// The node behind a key of the root dict.
Json NodeAt(const LoadedModel& model, const Json& key) {
  const Json metadata = MetadataOf(model);
  for (const auto& pair : metadata["structure"]["d"]) {
    if (pair[0] == key) {
      return pair[1];
    }
  }
  return "no such key";
}

bool Aligned(const LoadedModel& model, const std::string& name) {
  return reinterpret_cast<std::uintptr_t>(model.Bytes(name).data()) % 64 == 0;
}

}  // namespace

TEST_CASE("B1: something else under a checkpoint's name", "[torch]") {
  CHECK_THAT(LoadError(Fixture("junk_before.pt")), Contains("starts with 'junk"));
  const TempDir dir;
  CHECK_THAT(LoadError(dir.Write("x.pt", "")), Contains("empty"));
  CHECK_THAT(LoadError(dir.Write("x.pt", "<!DOCTYPE html><html>404</html>")), Contains("HTML"));
  CHECK(MustLoad("comment.pt").Values<float>("w") == kSix);
}

TEST_CASE("B2: a small view keeps its big storage, once", "[torch]") {
  const LoadedModel model = MustLoad("view.pt");
  CHECK(model.Shape("tensor") == std::vector<std::int64_t>{10});
  CHECK(model.manifest().storages().size() == 1);
  CHECK(model.manifest().PayloadBytes() == 4000000);
}

TEST_CASE("B3: a checkpoint repacked by a zip tool", "[torch]") {
  for (const char* name : {"deflated.pt", "stored.pt"}) {
    const LoadedModel model = MustLoad(name);
    CHECK(model.Values<float>("w") == kSix);
    CHECK(Aligned(model, "w"));
  }
  const LoadedModel plain = MustLoad("big.pt");
  const LoadedModel deflated = MustLoad("big_deflated.pt");
  CHECK(plain.Raw("big") == deflated.Raw("big"));
  CHECK(plain.Values<std::int32_t>("big").back() == 2999999);
  CHECK(std::memcmp(plain.manifest().storages()[0].digest, deflated.manifest().storages()[0].digest,
                    16) == 0);
  CHECK(std::memcmp(plain.manifest().storages()[0].sample, deflated.manifest().storages()[0].sample,
                    16) == 0);
}

TEST_CASE("B4: the folder inside the archive may be called anything, but there is one", "[torch]") {
  for (const char* name : {"a.pt", "b.bin", "c.pt", "weird name (1).pt"}) {
    CHECK(MustLoad(name).Values<float>("w") == kSix);
  }
  CHECK_THAT(LoadError(Fixture("two_tops.pt")), Contains("one top folder") && Contains("'other'"));
}

TEST_CASE("B5: the format from before the zip writer", "[torch]") {
  const LoadedModel model = MustLoad("legacy.pt");
  CHECK(model.Values<float>("w") == kSix);
  CHECK(model.Values<float>("v") == std::vector<float>{2, 3});
  CHECK(model.manifest().storages().size() == 1);
  const LoadedModel view = MustLoad("legacy_view.pt");
  CHECK(view.Values<float>("0").front() == 10.0F);
  CHECK(view.manifest().PayloadBytes() == 400);
}

TEST_CASE("B6: sizes, strides or offset beyond the storage", "[torch]") {
  CHECK_THAT(LoadError(Fixture("b6a.pt")),
             Contains("record '0'") && Contains("needs 2400 bytes, has 24"));
  CHECK_THAT(LoadError(Fixture("b6b.pt")),
             Contains("record '0'") && Contains("needs 36 bytes, has 24"));
  CHECK_THAT(LoadError(Fixture("b6c.pt")), Contains("record '0'") && Contains("offset -1"));
  CHECK_THAT(LoadError(Fixture("b6d.pt")), Contains("record '0'") && Contains("(-1)"));
}

TEST_CASE("B7: an element count that wraps or is negative", "[torch]") {
  CHECK_THAT(LoadError(Fixture("b7a.pt")),
             Contains("record '0'") && Contains("4611686018427387905"));
  CHECK_THAT(LoadError(Fixture("b7b.pt")), Contains("record '0'") && Contains("-1"));
}

TEST_CASE("B8: a pickle that would run a command is refused and named", "[torch]") {
  const std::string message = LoadError(Fixture("b8.pt"));
  CHECK_THAT(message, Contains("posix.system") && Contains("b8.pt"));
  CHECK_FALSE(std::filesystem::exists(Fixture("pwned")));
}

TEST_CASE("B9: a whole pickled module is refused with a way out", "[torch]") {
  CHECK_THAT(LoadError(Fixture("module.pt")),
             Contains("torch.nn.modules.linear.Linear") &&
                 Contains("save its state_dict() instead, or torch.jit.save it"));
}

TEST_CASE("B10: the version map of a state dict is kept", "[torch]") {
  const LoadedModel model = MustLoad("state.pt");
  CHECK(model.Shape("num_batches_tracked").empty());
  const Json structure = MetadataOf(model)["structure"];
  CHECK(structure["type"] == "OrderedDict");
  const Json metadata = structure["attrs"]["_metadata"];
  CHECK(metadata["type"] == "OrderedDict");
  CHECK(metadata["d"] == Json::parse(R"([["",{"d":[["version",2]],"type":"dict"}]])"));
}

TEST_CASE("B11: storages of a GPU come as bytes for the CPU", "[torch]") {
  CHECK(MustLoad("b11.pt").Values<float>("w") == kSix);
}

TEST_CASE("D12: every dtype keeps its bytes", "[torch]") {
  for (const char* name : {"dtypes.pt", "legacy_dtypes.pt"}) {
    const LoadedModel model = MustLoad(name);
    std::ifstream expected(Fixture("dtypes.txt"));
    int count = 0;
    for (std::string dtype, hex; expected >> dtype >> hex; ++count) {
      CHECK(DtypeName(static_cast<Dtype>(model.Tensor(dtype).dtype)) == dtype);
      std::string found;
      for (const char c : model.Raw(dtype)) {
        constexpr const char* kDigits = "0123456789abcdef";
        found += kDigits[static_cast<unsigned char>(c) >> 4U];
        found += kDigits[static_cast<unsigned char>(c) & 15U];
      }
      CHECK(found == hex);
    }
    CHECK(count == 20);
  }
}

TEST_CASE("Torch: nested structures keep names, aliases, views and leaves", "[torch]") {
  for (const char* name : {"nested2.pt", "nested4.pt", "nested5.pt"}) {
    const LoadedModel model = MustLoad(name);
    const Json inner = NodeAt(model, "model");
    CHECK(inner["type"] == "OrderedDict");
    // One object under two names, two views on one storage.
    const Json first = inner["d"][0][1];
    CHECK(inner["d"][1][1]["l"][0]["is"] == first["t"]);
    CHECK(model.Tensor("model.a").storage == model.Tensor("model.b.0").storage);
    CHECK(model.Tensor("model.b.1").storage == model.Tensor("model.b.2").storage);
    CHECK(model.Values<float>("model.b.1") == std::vector<float>{2, 3, 4});
    CHECK(model.Stride("model.b.2") == std::vector<std::int64_t>{1, 4});
    CHECK((model.Tensor("model.a").flags & (kTensorParameter | kTensorRequiresGrad)) ==
          (kTensorParameter | kTensorRequiresGrad));
    CHECK(NodeAt(model, "step") == 7);
    CHECK(NodeAt(model, "big")["int"] == "1208925819614629174706176");
    CHECK(NodeAt(model, "ratio")["float"] == "nan");
    CHECK(NodeAt(model, "name") == "n\xc3\xa4me");
    CHECK(NodeAt(model, "raw")["bytes"] == "AP8=");
    CHECK(NodeAt(model, "tuple")["u"] == Json::parse("[1,null,true]"));
    CHECK(NodeAt(model, "size")["size"] == Json::parse("[2,3]"));
    CHECK(NodeAt(model, "dtype")["dtype"] == "bfloat16");
    CHECK(NodeAt(model, "device")["device"] == "cuda:1");
    CHECK(NodeAt(model, "set")["set"] == Json::parse("[1]"));
    CHECK(NodeAt(model, "complex")["complex"] == Json::parse("[1.0,2.0]"));
    CHECK(NodeAt(model, 3)["t"].is_number());
    CHECK(model.Values<std::int64_t>("3") == std::vector<std::int64_t>{3});
    CHECK((model.Tensor("conj").flags & kTensorConjugate) != 0);
    CHECK(model.Tensor("meta").storage == kNoStorage);
    const Json quantization =
        MetadataOf(model)["quantization"][NodeAt(model, "quantized")["t"].dump()];
    CHECK(quantization["scale"] == 0.5);
    CHECK(quantization["zero_point"] == 3);
    CHECK_THAT(MetadataOf(model)["opaque"].dump(), Contains("path: pathlib.PurePosixPath"));
    CHECK(model.Has("sparse.0"));
  }
}

TEST_CASE("Torch: per-channel quantizers are lists of numbers, as clients read them", "[torch]") {
  for (const char* name : {"channels.pt", "channels_deflated.pt"}) {
    const LoadedModel model = MustLoad(name);
    CHECK(model.Names() == std::vector<std::string>{"c", "f", "after"});
    CHECK(model.manifest().storages().size() == 3);
    CHECK(model.Values<float>("after") == std::vector<float>{0, 1, 2});
    const auto description =
        ParseDescription(model.manifest().metadata_json(),
                         static_cast<std::uint32_t>(model.manifest().storages().size()));
    REQUIRE(description.ok());
    const auto& whole = description->quantization.at(0);
    CHECK(whole.per_channel);
    CHECK(whole.axis == 0);
    CHECK(whole.scales == std::vector<double>{0.5, 0.25});
    CHECK(whole.zero_points == std::vector<double>{1, -2});
    const auto& floats = description->quantization.at(1);
    CHECK(floats.float_qparams);
    CHECK(floats.zero_points == std::vector<double>{0.5, 1.5});
  }
}

TEST_CASE("Torch: a quantizer with too few scales is refused", "[torch]") {
  CHECK_THAT(LoadError(Fixture("channels_wrong.pt")),
             Contains("scales of 'c': 1 values for 2 channels"));
}

TEST_CASE("Torch: empty tensors and dicts", "[torch]") {
  const LoadedModel model = MustLoad("empty.pt");
  CHECK(model.Shape("e") == std::vector<std::int64_t>{0, 3});
  CHECK(model.manifest().PayloadBytes() == 0);
}

TEST_CASE("Torch: cycles, endless nesting and doubling are refused", "[torch]") {
  CHECK_THAT(LoadError(Fixture("cyclic.pt")), Contains("contains itself"));
  CHECK_THAT(LoadError(Fixture("deep.pt")), Contains("nested deeper than 200"));
  CHECK_THAT(LoadError(Fixture("bomb.pt")), Contains("more than"));
}

TEST_CASE("Torch: a missing record and a foreign byte order are named", "[torch]") {
  CHECK_THAT(LoadError(Fixture("no_record.pt")),
             Contains("record '0' is missing") && Contains("24 bytes"));
  CHECK_THAT(LoadError(Fixture("big_endian.pt")), Contains("byte order 'big'"));
}

TEST_CASE("Torch: no truncation and no flipped byte ends the loader", "[torch]") {
  const TempDir dir;
  for (const char* name : {"a.pt", "deflated.pt", "legacy.pt"}) {
    const std::string good = FileBytesOf(Fixture(name));
    REQUIRE_FALSE(good.empty());
    for (std::size_t size = 0; size < good.size(); ++size) {
      CHECK(LoadError(dir.Write("x", good.substr(0, size))) != "(loaded)");
    }
    for (std::size_t at = 0; at < good.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x55);
      CHECK_FALSE(LoadError(dir.Write("x", bad)).empty());
    }
  }
}

TEST_CASE("Torch: a checkpoint verifies against its file, and names what changed", "[torch]") {
  const TempDir dir;
  const std::string path = dir.Write("a.pt", FileBytesOf(Fixture("nested2.pt")));
  auto model = Load(path);
  REQUIRE(model.ok());
  const JobOutcome same = RunVerifyJob(*model);
  REQUIRE(same.verified);
  CHECK(same.verified->ok);
  CHECK(same.verified->disk == "same");
}

TEST_CASE("C1: TorchScript shares parameters and keeps constants and extra files", "[torch]") {
  const LoadedModel model = MustLoad("ts.pt");
  CHECK(model.Tensor("a.weight").storage == model.Tensor("b.weight").storage);
  CHECK(model.Raw("a.weight") == FileBytesOf(Fixture("ts_weight.bin")));
  CHECK(model.Values<float>("k") == std::vector<float>{0, 1, 2});
  CHECK(model.Values<float>("__constants__.0") == std::vector<float>{1, 2, 3});
  const Json script = MetadataOf(model)["torchscript"];
  std::uint64_t tensor_bytes = 0;
  for (const auto& [name, number] : script["records"].items()) {
    tensor_bytes += model.manifest().storages()[number.get<std::size_t>()].size_bytes;
  }
  CHECK(tensor_bytes == 36 + 12 + 12);
  CHECK(script["extra_files"]["info.txt"] == "aGVsbG8=");
  const auto archive = model.StorageBytes(script["archive"].get<std::uint32_t>());
  CHECK(std::memcmp(archive.data(), "PK\x03\x04", 4) == 0);
}

TEST_CASE("C1: the bytes of a large TorchScript module come from the file", "[torch]") {
  const LoadedModel model = MustLoad("ts_big.pt");
  CHECK(model.Raw("0.weight") == FileBytesOf(Fixture("ts_big.bin")));
}

TEST_CASE("C2: a constants record that is damaged is an error, or the loader's death", "[torch]") {
  for (const char* name : {"c2a.pt", "c2b.pt", "c2c.pt"}) {
    LoadRequest request;
    request.paths = {Fixture(name)};
    request.in_process = false;
    const JobOutcome outcome = RunLoadJob(request);
    INFO(name);
    REQUIRE_FALSE(outcome.result.ok());
    CHECK(outcome.exit_status != 0);
    if (outcome.exit_status < 128) {
      CHECK_THAT(outcome.result.error().message, Contains(name));
    }
  }
}

TEST_CASE("TorchScript: a record shorter than its pickle claims never reaches libtorch",
          "[torch]") {
  CHECK_THAT(
      LoadError(Fixture("short_constants.pt")),
      Contains("'constants.pkl'") && Contains("record 'constants/0': needs 12 bytes, has 4"));
  CHECK_THAT(LoadError(Fixture("short_free.pt")),
             Contains("record 'constants/0': needs 12 bytes, has 4"));
  CHECK_THAT(LoadError(Fixture("short_data.pt")),
             Contains("'data.pkl'") && Contains("record 'data/0'") && Contains("has 4"));
}

TEST_CASE("TorchScript: the constant of a free function is kept", "[torch]") {
  const LoadedModel model = MustLoad("free.pt");
  const Json records = MetadataOf(model)["torchscript"]["records"];
  REQUIRE(records.size() == 1);
  const auto bytes = model.StorageBytes(records.front().get<std::uint32_t>());
  std::vector<float> values(3);
  REQUIRE(bytes.size() == 12);
  std::memcpy(values.data(), bytes.data(), 12);
  CHECK(values == std::vector<float>{1, 2, 3});
}

TEST_CASE("TorchScript: a GPU that is not there is a clear error", "[torch]") {
  LoadRequest request;
  request.paths = {Fixture("ts.pt")};
  request.device = "cuda:0";
  const auto model = Load(request);
  REQUIRE_FALSE(model.ok());
  CHECK_THAT(model.error().message, Contains("cuda:0") && Contains("CUDA"));
}

}  // namespace modelcache
