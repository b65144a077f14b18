// The C interface and its C++ wrapper, through the shared library.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>

#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/temp_dir.h"

// Behind our own headers: they too have a modelcache::Result, which no user ever sees.
#include <modelcache/client.hpp>

using modelcache::BuildModel;
using modelcache::BuildOptions;
using modelcache::BuiltModel;
using modelcache::FakeDaemon;
using modelcache::FakeSession;
using modelcache::Floats;
using modelcache::Frame;
using modelcache::MessageType;

namespace {

BuildOptions WithMetadata() {
  BuildOptions options;
  options.format = "torchscript";
  options.metadata_json =
      R"({"torchscript": {"archive": 0, "records": {"0.storage": 1}, "extra_files": {"i": "aGk="}},
          "quantization": {"1": {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 3}}})";
  return options;
}

struct World {
  World()
      : built(BuildModel({Floats("a", 4, 1), Floats("b", 2, 7)}, WithMetadata())),
        daemon(dir / "socket", [this](FakeSession& session, const Frame& request) {
          if (request.header.type == MessageType::kOpen) {
            session.Event(request, MessageType::kProgress, modelcache::ProgressEvent{1, 2});
            session.Reply(request, built.reply);
          } else {
            session.Reply(request, modelcache::ListReply{});
          }
        }) {
    options.socket_path = dir / "socket";
    options.autostart = MC_AUTOSTART_NEVER;
  }

  modelcache::v0::Client Connect() {
    return modelcache::v0::Client::Connect(options).ValueOrThrow();
  }

  modelcache::TempDir dir;
  std::string file = dir.Write("f", "x");
  BuiltModel built;
  FakeDaemon daemon;
  modelcache::ConnectOptions options;
};

}  // namespace

TEST_CASE("Api: a model from open to close", "[unit]") {
  World world;
  auto client = world.Connect();
  std::uint64_t total = 0;
  modelcache::ModelOptions options;
  options.progress = [&](std::uint64_t, std::uint64_t all) {
    total = all;
    return true;
  };
  auto model = client.Open(world.file, options);
  REQUIRE(model.ok());
  CHECK(total == 2);
  CHECK(model->size() == 2);
  auto tensor = model->Find("b");
  REQUIRE(tensor.ok());
  CHECK(tensor->dtype() == "float32");
  CHECK(tensor->shape().size() == 1);
  CHECK(tensor->shape()[0] == 2);
  CHECK(*static_cast<float*>(tensor->data()) == 7);
  CHECK(model->Find("c").error().status == MC_NOT_FOUND);
  // A C string would end at the zero byte, and be the name of another tensor.
  const auto longer = model->Find(std::string("b\0x", 3));
  REQUIRE_FALSE(longer.ok());
  CHECK(longer.error().status == MC_NOT_FOUND);
  CHECK(longer.error().message == "the model has no tensor 'b\\x00x'");
  CHECK(model->Info().payload_bytes == 24);
  CHECK(std::string(model->Info().format) == "torchscript");
  CHECK(model->Tensors()[0].name() == "a");
}

TEST_CASE("Api: a model is a range of tensors with typed data", "[unit]") {
  World world;
  auto model = world.Connect().Open(world.file).ValueOrThrow();
  std::string names;
  for (const modelcache::TensorView& tensor : model) {
    names += std::string(tensor.name()) + std::to_string(tensor.count());
  }
  CHECK(names == "a4b2");
  const auto tensor = model.Find("b").ValueOrThrow();
  CHECK(tensor.As<float>().ValueOrThrow()[1] == 8);
  const auto wrong = tensor.As<std::int64_t>();
  REQUIRE_FALSE(wrong.ok());
  CHECK(wrong.error().message == "tensor 'b' is float32, not int64");
  static_assert(modelcache::DtypeOf<std::uint8_t>() == "uint8");
  static_assert(modelcache::DtypeOf<double>() == "float64");
}

TEST_CASE("Api: one call opens at the socket of the environment", "[unit]") {
  World world;
  REQUIRE(::setenv("MODELCACHE_SOCKET", (world.dir / "socket").c_str(), 1) == 0);
  auto model = modelcache::Open(world.file);
  REQUIRE(::unsetenv("MODELCACHE_SOCKET") == 0);
  REQUIRE(model.ok());
  CHECK(model->size() == 2);
}

TEST_CASE("Api: a list of two literals is two paths, not one string", "[unit]") {
  World world;
  (void)world.dir.Write("g", "y");
  auto client = world.Connect();
  const auto model = client.Open({"/nonexistent/a", "/nonexistent/b"});
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().status == MC_NOT_FOUND);
  CHECK(model.error().message.find("/nonexistent/a") != std::string::npos);
  CHECK(client.Open({world.file, world.dir / "g"}).ok());
  CHECK(client.Open({world.file.c_str()}).ok());
}

TEST_CASE("Api: a retained model outlives its first close and its client", "[unit]") {
  World world;
  mc_model* raw = nullptr;
  {
    auto client = world.Connect();
    auto model = client.Open(world.file).ValueOrThrow();
    raw = mc_model_retain(model.get());
  }
  mc_tensor tensor = {};
  tensor.struct_size = sizeof tensor;
  REQUIRE(mc_model_tensor_at(raw, 0, &tensor) == MC_OK);
  CHECK(static_cast<float*>(tensor.data)[3] == 4);
  CHECK(world.daemon.Frames(MessageType::kRelease) == 0);
  mc_model_close(raw);
  CHECK(world.daemon.WaitForFrames(MessageType::kRelease, 1));
}

TEST_CASE("Api: the tables say what the calls say", "[unit]") {
  World world;
  auto model = world.Connect().Open(world.file).ValueOrThrow();
  mc_tables tables = {};
  tables.struct_size = sizeof tables;
  REQUIRE(mc_model_tables(model.get(), &tables) == MC_OK);
  REQUIRE(tables.tensor_count == 2);
  for (std::uint32_t i = 0; i < tables.tensor_count; ++i) {
    const mc_tensor_record& record = tables.tensors[i];
    const mc_tensor tensor = model.At(i).raw();
    CHECK(tables.base + record.name_offset == tensor.name);
    CHECK(record.nbytes == tensor.nbytes);
    CHECK(tables.storage_data[record.storage] == tensor.storage_data);
    CHECK(tables.dimensions + record.dimensions_index == tensor.shape);
  }
}

TEST_CASE("Api: quantizers and TorchScript records", "[unit]") {
  World world;
  auto model = world.Connect().Open(world.file).ValueOrThrow();
  mc_quantization quantization = {};
  quantization.struct_size = sizeof quantization;
  REQUIRE(mc_model_quantization(model.get(), 1, &quantization) == MC_OK);
  CHECK(quantization.scale == 0.5);
  CHECK(quantization.zero_point == 3);
  CHECK(mc_model_quantization(model.get(), 0, &quantization) == MC_NOT_FOUND);
  mc_script script = {};
  script.struct_size = sizeof script;
  REQUIRE(mc_model_script(model.get(), &script) == MC_OK);
  CHECK(script.record_count == 1);
  const char* name = nullptr;
  std::uint32_t storage = 0;
  REQUIRE(mc_model_script_record_at(model.get(), 0, &name, &storage) == MC_OK);
  CHECK(std::string(name) == "0.storage");
  CHECK(mc_model_script_record_at(model.get(), 1, &name, &storage) == MC_NOT_FOUND);
  const char* bytes = nullptr;
  std::uint64_t count = 0;
  REQUIRE(mc_model_extra_file_at(model.get(), 0, &name, &bytes, &count) == MC_OK);
  CHECK(std::string(bytes, count) == "hi");
}

TEST_CASE("Api: structs of another size", "[unit]") {
  World world;
  auto client = world.Connect();
  struct Newer {
    mc_open_options known;
    std::uint64_t unknown;
  } newer = {};
  newer.known.struct_size = sizeof newer;
  const char* path = world.file.c_str();
  mc_model* model = nullptr;
  REQUIRE(mc_model_open(client.get(), &path, 1, &newer.known, &model) == MC_OK);
  newer.unknown = 1;
  CHECK(mc_model_open(client.get(), &path, 1, &newer.known, &model) == MC_INVALID_ARGUMENT);
  mc_tensor older;
  std::memset(&older, 0x5A, sizeof older);
  older.struct_size = offsetof(mc_tensor, shape);
  CHECK(mc_model_tensor_at(model, 0, &older) == MC_OK);
  CHECK(std::string(older.name) == "a");
  CHECK(older.ndim == 0x5A5A5A5A);  // behind the end of the caller's struct: untouched
  older.struct_size = 0;
  CHECK(mc_model_tensor_at(model, 0, &older) == MC_INVALID_ARGUMENT);
  mc_model_close(model);
}

TEST_CASE("Api: null and nonsense arguments are refused", "[unit]") {
  World world;
  auto client = world.Connect();
  const char* path = world.file.c_str();
  const char* missing = nullptr;
  mc_model* model = nullptr;
  char* text = nullptr;
  mc_open_options options = {};
  options.struct_size = sizeof options;
  options.flags = 1U << 31U;
  CHECK(mc_client_connect(nullptr, nullptr) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open(nullptr, &path, 1, nullptr, &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open(client.get(), nullptr, 1, nullptr, &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open(client.get(), &missing, 1, nullptr, &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open(client.get(), &path, 0, nullptr, &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open(client.get(), &path, 1, &options, &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_model_open_resident(client.get(), "", &model) == MC_INVALID_ARGUMENT);
  CHECK(mc_call(client.get(), "what", nullptr, &text) == MC_INVALID_ARGUMENT);
  CHECK(std::string(mc_last_error()).find("what") != std::string::npos);
  CHECK(mc_model_tensor_count(nullptr) == 0);
  CHECK(mc_model_retain(nullptr) == nullptr);
  mc_model_close(nullptr);
  mc_client_close(nullptr);
  mc_free(nullptr);
}

TEST_CASE("Api: a callback can give up waiting", "[unit]") {
  World world;
  modelcache::ModelOptions options;
  options.progress = [](std::uint64_t, std::uint64_t) { return false; };
  CHECK(world.Connect().Open(world.file, options).error().status == MC_CANCELLED);
}

TEST_CASE("Api: names of statuses and dtypes come from the library", "[unit]") {
  CHECK(std::string(mc_status_text(MC_NO_ROOM)) == "no_room");
  CHECK(std::string(mc_status_text(-1)) == "unknown");
  CHECK(std::string(mc_status_text(65536)) == "unknown");
  CHECK(std::string(mc_dtype_name(12)) == "float32");
  CHECK(std::string(mc_dtype_name(0)).empty());
  CHECK(std::string(mc_dtype_name(65537)).empty());
  CHECK(mc_dtype_bits(12) == 32);
  CHECK(mc_dtype_bits(100) == 0);
  CHECK(mc_dtype_count() >= 34);
}

TEST_CASE("Api: the library exports nothing but mc_ names", "[unit]") {
  void* library = ::dlopen("libmodelcache.so.0", RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(library != nullptr);
  CHECK(::dlsym(library, "mc_version") != nullptr);
  CHECK(::dlsym(library, "_ZN10modelcache6Client7ConnectENS_13ClientOptionsE") == nullptr);
  (void)::dlclose(library);
}
