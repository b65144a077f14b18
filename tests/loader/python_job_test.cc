// The C interface of a Python process that is a loader, against a fake daemon.
#include "server/loader/python_job.h"

#include <unistd.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "common/memfd.h"
#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

constexpr std::int32_t kOk = 0;
constexpr auto kInvalid = static_cast<std::int32_t>(ErrorCode::kInvalidArgument);
constexpr auto kUnsupported = static_cast<std::int32_t>(ErrorCode::kUnsupported);
constexpr auto kBadFile = static_cast<std::int32_t>(ErrorCode::kBadFile);

// Runs `loader` with the job of a call whose payload is "payload".
JobOutcome RunCall(const std::function<void(mc_job* job)>& loader,
                   const DaemonScript& script = {}) {
  JobRequest request;
  request.format = kCallFormat;
  request.files.push_back({"call", "call:0"});
  request.model_id.bytes[0] = 5;
  request.arena_max_bytes = 1U << 30U;
  const std::string text = "payload";
  const auto payload = MakeSealedMemfd("test", std::as_bytes(std::span(text)));
  const auto take = [&](UniqueFd socket) {
    mc_job* job = nullptr;
    const std::int32_t status = mc_job_receive(socket.Release(), &job);
    INFO(mc_job_last_error());
    CHECK(status == kOk);
    if (status == kOk) {
      loader(job);
    }
    mc_job_close(job);
  };
  return RunWith(take, request, {payload->get()}, script);
}

// A result of byte strings; what it refers to must outlive it.
struct TestResult {
  explicit TestResult(const std::vector<std::string>& contents) {
    for (const std::string& content : contents) {
      storages.push_back({content.data(), content.size()});
    }
  }

  void Add(const char* name, const char* dtype, std::uint32_t storage) {
    mc_job_tensor tensor = {};
    tensor.name = name;
    tensor.name_bytes = std::strlen(name);
    tensor.dtype = dtype;
    tensor.shape = shape.data();
    tensor.stride = stride.data();
    tensor.ndim = 1;
    tensor.storage = storage;
    tensors.push_back(tensor);
  }

  std::int32_t Commit(mc_job* job) {
    result.struct_size = sizeof result;
    result.storages = storages.data();
    result.storage_count = storages.size();
    result.tensors = tensors.data();
    result.tensor_count = tensors.size();
    result.metadata = metadata.data();
    result.metadata_bytes = metadata.size();
    return mc_job_commit(job, &result);
  }

  std::vector<mc_job_storage> storages;
  std::vector<mc_job_tensor> tensors;
  std::array<std::int64_t, 1> shape{2};
  std::array<std::int64_t, 1> stride{1};
  std::string metadata = R"({"python":{}})";
  mc_job_result result = {};
};

TEST_CASE("PythonJob: a result becomes a sealed model", "[unit]") {
  const std::vector<std::string> contents{"stream", std::string(100000, 'x'), "",
                                          std::string(100000, 'x')};
  std::string payload(7, ' ');
  JobOutcome outcome = RunCall([&](mc_job* job) {
    CHECK(::pread(mc_job_payload(job), payload.data(), payload.size(), 0) == 7);
    CHECK(mc_job_progress(job, 1, 2) == kOk);
    TestResult result(contents);
    result.Add("w", "float32", 1);
    result.Add("m", "bfloat16", kNoStorage);
    CHECK(result.Commit(job) == kOk);
  });
  CHECK(payload == "payload");
  REQUIRE(outcome.result.ok());
  CHECK(outcome.progress_events > 0);
  const auto model = LoadedModel::Make(std::move(outcome.arenas));
  REQUIRE(model.ok());
  CHECK(model->manifest().format() == "python");
  CHECK(model->manifest().metadata_json() == R"({"python":{}})");
  const auto records = model->manifest().storages();
  REQUIRE(records.size() == contents.size());
  for (std::uint32_t i = 0; i < records.size(); ++i) {
    const auto bytes = model->StorageBytes(i);
    CHECK(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()) == contents[i]);
  }
  CHECK(records[1].offset_bytes == records[3].offset_bytes);
  CHECK(model->Names() == std::vector<std::string>{"w", "m"});
  CHECK(model->Raw("w") == std::string(8, 'x'));
}

TEST_CASE("PythonJob: what is wrong with a result is found first, and it may be tried again",
          "[unit]") {
  const std::vector<std::string> contents{std::string(100, 'x')};
  JobOutcome outcome = RunCall([&](mc_job* job) {
    TestResult outside(contents);
    outside.shape = {26};
    outside.Add("w", "float32", 0);
    CHECK(outside.Commit(job) == kBadFile);
    CHECK_THAT(mc_job_last_error(), Contains("w"));
    TestResult missing(contents);
    missing.Add("w", "float32", 3);
    CHECK(missing.Commit(job) == kBadFile);
    TestResult twice(contents);
    twice.Add("w", "float32", 0);
    twice.Add("w", "float32", 0);
    CHECK(twice.Commit(job) == kBadFile);
    TestResult unknown(contents);
    unknown.Add("w", "uint3", 0);
    CHECK(unknown.Commit(job) == kUnsupported);
    CHECK_THAT(mc_job_last_error(), Contains("uint3"));
    TestResult nameless(contents);
    nameless.Add("w", "float32", 0);
    nameless.tensors[0].name = nullptr;
    CHECK(nameless.Commit(job) == kInvalid);
    TestResult flagged(contents);
    flagged.Add("w", "float32", 0);
    flagged.tensors[0].flags = 1U << 20U;
    CHECK(flagged.Commit(job) == kInvalid);
    TestResult wide(contents);
    wide.Add("w", "float32", 0);
    wide.tensors[0].ndim = 65;
    CHECK(wide.Commit(job) == kInvalid);
    TestResult empty(contents);
    empty.storages[0].data = nullptr;
    CHECK(empty.Commit(job) == kInvalid);
    CHECK(TestResult(contents).Commit(job) == kOk);
  });
  CHECK(outcome.result.ok());
}

TEST_CASE("PythonJob: arguments that are NULL or of another version are refused", "[unit]") {
  const auto bad = static_cast<std::int32_t>(ErrorCode::kInvalidArgument);
  mc_job* none = nullptr;
  CHECK(mc_job_receive(-1, &none) == bad);
  CHECK(mc_job_receive(0, nullptr) == bad);
  CHECK(mc_job_payload(nullptr) == -1);
  CHECK(mc_job_progress(nullptr, 0, 0) == bad);
  CHECK(mc_job_commit(nullptr, nullptr) == bad);
  CHECK(mc_job_fail(nullptr, "x", "x", nullptr) == bad);
  mc_job_close(nullptr);
  JobOutcome outcome = RunCall([&](mc_job* job) {
    mc_job_result result = {};
    CHECK(mc_job_commit(job, &result) == bad);  // no struct_size
    CHECK(mc_job_fail(job, "no_such_status", "x", nullptr) == bad);
    CHECK(mc_job_fail(job, "unknown", "x", nullptr) == bad);
    CHECK(mc_job_fail(job, nullptr, "x", nullptr) == bad);
  });
  CHECK_THAT(outcome.result.error().message, Contains("without a word"));
}

TEST_CASE("PythonJob: a failure has status, message and detail", "[unit]") {
  JobOutcome outcome = RunCall(
      [](mc_job* job) { CHECK(mc_job_fail(job, "unsupported", "unet.x: a lock", "AAEC") == kOk); });
  REQUIRE_FALSE(outcome.result.ok());
  CHECK(outcome.result.error().code == ErrorCode::kUnsupported);
  CHECK(outcome.result.error().message == "unet.x: a lock");
  CHECK(outcome.detail == "AAEC");
  const std::string large(kMaxDetailBytes + 1, 'A');
  outcome = RunCall([&](mc_job* job) {
    CHECK(mc_job_fail(job, "loader_failed", "large", large.c_str()) == kOk);
  });
  CHECK(outcome.result.error().message == "large");
  CHECK(outcome.detail.empty());
}

TEST_CASE("PythonJob: the daemon's refusal is the commit's", "[unit]") {
  const std::vector<std::string> contents{std::string(100000, 'x')};
  DaemonScript script;
  script.budget_bytes = 1000;
  std::int32_t status = kOk;
  (void)RunCall(
      [&](mc_job* job) {
        status = TestResult(contents).Commit(job);
        CHECK(mc_job_fail(job, "no_room", mc_job_last_error(), nullptr) == kOk);
      },
      script);
  CHECK(status == static_cast<std::int32_t>(ErrorCode::kNoRoom));
}

TEST_CASE("PythonJob: only the job of a call is taken", "[unit]") {
  JobRequest request;
  request.kind = JobKind::kCollapse;
  std::int32_t status = kOk;
  (void)RunWith(
      [&](UniqueFd socket) {
        mc_job* job = nullptr;
        status = mc_job_receive(socket.Release(), &job);
        CHECK(job == nullptr);
      },
      request, {});
  CHECK(status == static_cast<std::int32_t>(ErrorCode::kProtocol));
}

}  // namespace
}  // namespace modelcache
