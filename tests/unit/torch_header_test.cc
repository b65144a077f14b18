// torch.hpp: tensors over a mapped model, made by a fake daemon.
#include <ATen/ATen.h>

#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/temp_dir.h"

// Behind our own headers: they too have a modelcache::Result, which no user ever sees.
#include <modelcache/torch.hpp>

using modelcache::BuildModel;
using modelcache::BuildOptions;
using modelcache::BuiltModel;
using modelcache::BuiltTensor;
using modelcache::Dtype;
using modelcache::FakeDaemon;
using modelcache::FakeSession;
using modelcache::Floats;
using modelcache::Frame;
using modelcache::ManifestSpec;
using modelcache::TorchModel;

namespace {

struct World {
  explicit World(const std::vector<BuiltTensor>& tensors, const BuildOptions& build = {})
      : built(BuildModel(tensors, build)),
        daemon(dir / "socket", [this](FakeSession& session, const Frame& request) {
          session.Reply(request, built.reply);
        }) {
    options.socket_path = dir / "socket";
    options.autostart = MC_AUTOSTART_NEVER;
  }

  modelcache::v0::Model Open() {
    return modelcache::v0::Client::Connect(options).ValueOrThrow().Open(file).ValueOrThrow();
  }

  modelcache::TempDir dir;
  std::string file = dir.Write("f", "x");
  BuiltModel built;
  FakeDaemon daemon;
  modelcache::ConnectOptions options;
};

// A view of the first storage.
modelcache::TensorSpec View(const std::string& name, std::vector<std::int64_t> shape,
                            std::vector<std::int64_t> stride, std::uint64_t offset_bytes) {
  modelcache::TensorSpec tensor;
  tensor.name = name;
  tensor.shape = std::move(shape);
  tensor.stride = std::move(stride);
  tensor.storage = 0;
  tensor.data_offset_bytes = offset_bytes;
  return tensor;
}

}  // namespace

TEST_CASE("TorchHeader: views of one storage share it, with shape, stride and offset", "[torch]") {
  BuildOptions options;
  options.edit_spec = [](ManifestSpec& spec) {
    spec.tensors.push_back(View("view", {2, 2}, {1, 3}, 8));
  };
  World world({Floats("base", 8, 0)}, options);
  TorchModel model(world.Open());
  const at::Tensor base = model.Tensor("base").ValueOrThrow();
  const at::Tensor view = model.Tensor("view").ValueOrThrow();
  CHECK(view.is_alias_of(base));
  CHECK(view.storage_offset() == 2);
  CHECK(view[1][1].item<float>() == 6);
  view[0][0] = 40;
  CHECK(base[2].item<float>() == 40);
  CHECK(base.storage().nbytes() == 32);
}

TEST_CASE("TorchHeader: the last tensor keeps the lease, its death ends it", "[torch]") {
  World world({Floats("a", 4, 1), Floats("b", 4, 1)});
  at::Tensor slice;
  {
    TorchModel model(world.Open());
    slice = model.Tensor("a").ValueOrThrow().slice(0, 2, 4);
    CHECK(model.Tensors().ValueOrThrow().size() == 2);
  }
  CHECK(slice[1].item<float>() == 4);
  CHECK(world.daemon.Frames(modelcache::MessageType::kRelease) == 0);
  slice.reset();
  CHECK(world.daemon.WaitForFrames(modelcache::MessageType::kRelease, 1));
}

TEST_CASE("TorchHeader: two opens do not see each other's writes", "[torch]") {
  World world({Floats("a", 4, 1)});
  const at::Tensor one = TorchModel(world.Open()).Tensor("a").ValueOrThrow();
  const at::Tensor two = TorchModel(world.Open()).Tensor("a").ValueOrThrow();
  one.add_(1);
  CHECK(one.sum().item<float>() == 14);
  CHECK(two.sum().item<float>() == 10);
}

TEST_CASE("TorchHeader: growing a tensor copies it out of the mapping", "[torch]") {
  World world({Floats("a", 4, 1)});
  at::Tensor tensor = TorchModel(world.Open()).Tensor("a").ValueOrThrow();
  tensor.resize_({100});
  CHECK(tensor[3].item<float>() == 4);
}

TEST_CASE("TorchHeader: gradient, conjugate and negative flags, and the meta device", "[torch]") {
  BuildOptions options;
  options.edit_spec = [](ManifestSpec& spec) {
    spec.tensors[0].flags = modelcache::kTensorRequiresGrad;
    spec.tensors[1].flags = modelcache::kTensorConjugate;
    spec.tensors[2].flags = modelcache::kTensorNegative;
    auto meta = View("meta", {3, 4}, {4, 1}, 0);
    meta.storage = modelcache::kNoStorage;
    spec.tensors.push_back(meta);
  };
  BuiltTensor complex = Floats("complex", 2, 1);
  complex.dtype = Dtype::kComplex64;
  complex.shape = {1};
  World world({Floats("grad", 2, 1), complex, Floats("neg", 1, 5)}, options);
  TorchModel model(world.Open());
  CHECK(model.Tensor("grad").ValueOrThrow().requires_grad());
  const at::Tensor conjugate = model.Tensor("complex").ValueOrThrow();
  CHECK(conjugate.is_conj());
  CHECK(at::imag(conjugate.resolve_conj())[0].item<float>() == -2);
  CHECK(model.Tensor("neg").ValueOrThrow()[0].item<float>() == -5);
  const at::Tensor meta = model.Tensor("meta").ValueOrThrow();
  CHECK(meta.is_meta());
  CHECK(meta.sizes() == at::IntArrayRef({3, 4}));
}

TEST_CASE("TorchHeader: every dtype that libtorch has arrives as it", "[torch]") {
  std::vector<BuiltTensor> tensors;
  for (std::uint16_t number = 1; number <= modelcache::kDtypeCount; ++number) {
    const auto dtype = static_cast<Dtype>(number);
    const std::string name(modelcache::DtypeName(dtype));
    const bool quantized = name[0] == 'q' || name.substr(0, 5) == "quint";
    if (!quantized) {
      tensors.push_back({name, dtype, {4}, std::string(DtypeBits(dtype) * 4 / 8, '\0')});
    }
  }
  World world(tensors);
  TorchModel model(world.Open());
  for (const BuiltTensor& tensor : tensors) {
    auto built = model.Tensor(tensor.name);
    if (tensor.name.rfind("float6_", 0) == 0) {
      REQUIRE_FALSE(built.ok());
      CHECK(built.error().status == MC_UNSUPPORTED);
      CHECK_THAT(built.error().message, Contains(tensor.name) && Contains(TORCH_VERSION));
    } else {
      REQUIRE(built.ok());
      CHECK(built->numel() == 4);
      CHECK(built->element_size() * 8 == modelcache::DtypeBits(tensor.dtype));
    }
  }
}

TEST_CASE("TorchHeader: quantized tensors get their quantizer", "[torch]") {
  BuildOptions options;
  options.metadata_json =
      R"({"quantization": {"0": {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 1},
          "1": {"scheme": "per_channel_affine", "scale": [1, 2], "zero_point": [0, 1], "axis": 0}}})";
  BuiltTensor whole{"whole", Dtype::kQint8, {2}, "\x03\x05"};
  BuiltTensor channels{"channels", Dtype::kQint8, {2, 1}, "\x03\x05"};
  BuiltTensor bare{"bare", Dtype::kQint8, {2}, "\x03\x05"};
  World world({whole, channels, bare}, options);
  TorchModel model(world.Open());
  CHECK(model.Tensor("whole").ValueOrThrow().dequantize()[1].item<float>() == 2);
  CHECK(model.Tensor("channels").ValueOrThrow().dequantize()[1][0].item<float>() == 8);
  CHECK(model.Tensor("bare").error().status == MC_UNSUPPORTED);
}

TEST_CASE("TorchHeader: what is no module, and an archive that is none", "[torch]") {
  World plain({Floats("a", 4, 1)});
  CHECK(modelcache::LoadModule(plain.Open()).error().status == MC_NOT_FOUND);
  CHECK(TorchModel(plain.Open()).Tensor("b").error().status == MC_NOT_FOUND);
  BuildOptions options;
  options.metadata_json = R"({"torchscript": {"archive": 0, "records": {}}})";
  World damaged({Floats("a", 4, 1)}, options);
  CHECK(modelcache::LoadModule(damaged.Open()).error().status == MC_BAD_FILE);
}
