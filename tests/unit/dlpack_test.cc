// DLPack structs of a model, through the shared library, read as a consumer reads them.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/temp_dir.h"

// Behind our own headers: they too have a modelcache::Result, which no user ever sees.
#include <modelcache/client.hpp>

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
using modelcache::MessageType;

namespace {

// The unversioned structs of DLPack's dlpack.h, retyped here so that the library's own do not check
// themselves.
struct ManagedTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

struct World {
  World(const std::vector<BuiltTensor>& tensors, const BuildOptions& options)
      : built(BuildModel(tensors, options)),
        daemon(dir / "socket", [this](FakeSession& session, const Frame& request) {
          session.Reply(request, built.reply);
        }) {
    modelcache::ConnectOptions connect;
    connect.socket_path = dir / "socket";
    connect.autostart = MC_AUTOSTART_NEVER;
    auto client = modelcache::v0::Client::Connect(connect).ValueOrThrow();
    model =
        std::make_unique<modelcache::v0::Model>(client.Open(dir.Write("f", "x")).ValueOrThrow());
  }

  // The structs of all tensors; the caller owns them.
  [[nodiscard]] std::vector<ManagedTensor*> Export() const {
    std::vector<void*> raw(model->size());
    REQUIRE(mc_model_dlpack(model->get(), raw.size(), raw.data()) == MC_OK);
    std::vector<ManagedTensor*> made;
    for (void* one : raw) {
      made.push_back(static_cast<ManagedTensor*>(one));
    }
    return made;
  }

  modelcache::TempDir dir;
  BuiltModel built;
  FakeDaemon daemon;
  std::unique_ptr<modelcache::v0::Model> model;
};

BuiltTensor Bytes(const std::string& name, Dtype dtype, std::size_t count) {
  return {name, dtype, {1}, std::string(count, 'x')};
}

}  // namespace

TEST_CASE("Dlpack: shape, strides, type and address are the tensor's", "[unit]") {
  BuiltTensor matrix = Floats("m", 6, 1);
  matrix.shape = {2, 3};
  BuildOptions options;
  options.edit_spec = [](ManifestSpec& spec) { spec.tensors[1].stride = {1, 2}; };
  BuiltTensor turned = matrix;
  turned.name = "t";
  const World world({matrix, turned}, options);
  const std::vector<ManagedTensor*> made = world.Export();
  REQUIRE(made.size() == 2);
  for (std::size_t i = 0; i < made.size(); ++i) {
    REQUIRE(made[i] != nullptr);
    CHECK(made[i]->device_type == 1);
    CHECK(made[i]->device_id == 0);
    REQUIRE(made[i]->ndim == 2);
    CHECK(made[i]->shape[0] == 2);
    CHECK(made[i]->shape[1] == 3);
    CHECK(made[i]->byte_offset == 0);
    CHECK(made[i]->data == world.model->At(i).data());
    CHECK(static_cast<float*>(made[i]->data)[5] == 6);
  }
  CHECK(std::vector(made[0]->strides, made[0]->strides + 2) == std::vector<std::int64_t>{3, 1});
  CHECK(std::vector(made[1]->strides, made[1]->strides + 2) == std::vector<std::int64_t>{1, 2});
  for (ManagedTensor* one : made) {
    one->deleter(one);
  }
}

TEST_CASE("Dlpack: element types by DLPack's numbers", "[unit]") {
  struct Row {
    Dtype dtype;
    std::size_t bytes;
    int code;
  };
  // kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4, kDLComplex 5, kDLBool 6.
  const std::vector<Row> rows = {
      {Dtype::kInt8, 1, 0},    {Dtype::kInt64, 8, 0},    {Dtype::kUint8, 1, 1},
      {Dtype::kUint32, 4, 1},  {Dtype::kFloat16, 2, 2},  {Dtype::kFloat32, 4, 2},
      {Dtype::kFloat64, 8, 2}, {Dtype::kBfloat16, 2, 4}, {Dtype::kComplex64, 8, 5},
      {Dtype::kBool, 1, 6},
  };
  std::vector<BuiltTensor> tensors;
  for (const Row& row : rows) {
    tensors.push_back(Bytes("t" + std::to_string(tensors.size()), row.dtype, row.bytes));
  }
  const World world(tensors, {});
  const std::vector<ManagedTensor*> made = world.Export();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    REQUIRE(made[i] != nullptr);
    CHECK(made[i]->code == rows[i].code);
    CHECK(made[i]->bits == rows[i].bytes * 8);
    CHECK(made[i]->lanes == 1);
    made[i]->deleter(made[i]);
  }
}

TEST_CASE("Dlpack: what would lose something is left out", "[unit]") {
  BuildOptions options;
  options.edit_spec = [](ManifestSpec& spec) {
    spec.tensors[1].shape = {3};  // a part of its storage
    spec.tensors[2].flags = MC_TENSOR_PARAMETER;
  };
  const World world({Floats("whole", 4, 1), Floats("part", 4, 1), Floats("flagged", 4, 1),
                     Floats("empty", 0, 1), Bytes("float8", Dtype::kFloat8E4m3fn, 1)},
                    options);
  const std::vector<ManagedTensor*> made = world.Export();
  REQUIRE(made[0] != nullptr);
  for (std::size_t i = 1; i < made.size(); ++i) {
    CHECK(made[i] == nullptr);
  }
  made[0]->deleter(made[0]);
}

TEST_CASE("Dlpack: the lease ends with the last struct, not before", "[unit]") {
  World world({Floats("a", 4, 1), Floats("b", 4, 5)}, {});
  const std::vector<ManagedTensor*> made = world.Export();
  const std::vector<ManagedTensor*> again = world.Export();
  world.model.reset();
  for (ManagedTensor* one : {made[0], again[0], again[1]}) {
    one->deleter(one);
  }
  CHECK(static_cast<float*>(made[1]->data)[0] == 5);  // still mapped
  CHECK(world.daemon.Frames(MessageType::kRelease) == 0);
  made[1]->deleter(made[1]);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
  CHECK(world.daemon.Frames(MessageType::kRelease) == 1);
}

TEST_CASE("Dlpack: a wrong count is refused and nothing is owned", "[unit]") {
  World world({Floats("a", 4, 1)}, {});
  std::array<void*, 2> out = {};
  CHECK(mc_model_dlpack(world.model->get(), 2, out.data()) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_dlpack(world.model->get(), 1, nullptr) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_dlpack(nullptr, 1, out.data()) == MC_INVALID_ARGUMENT);
  CHECK(out[0] == nullptr);
  world.model.reset();
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}
