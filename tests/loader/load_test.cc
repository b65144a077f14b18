// The job of a load: sharing, layout, budget, files that change, indexes, memory, verification.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "common/digest.h"
#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

struct Entry {
  std::string name;
  std::string bytes;
};

// A safetensors file of U8 tensors.
std::string Bytes8File(const std::vector<Entry>& entries) {
  std::string header = "{";
  std::string data;
  for (const Entry& entry : entries) {
    const std::string first = std::to_string(data.size());
    data += entry.bytes;
    header += (header.size() > 1 ? ",\"" : "\"") + entry.name + R"(":{"dtype":"U8","shape":[)" +
              std::to_string(entry.bytes.size()) + R"(],"data_offsets":[)" + first + "," +
              std::to_string(data.size()) + "]}";
  }
  return SafetensorsFile(header + "}", data);
}

// `size` bytes that differ for every seed.
std::string Noise(std::size_t size, unsigned seed) {
  std::string bytes(size, '\0');
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(&bytes[i], &state, 8);
  }
  return bytes;
}

LoadedModel MustLoad(const LoadRequest& request, const DaemonScript& script = {}) {
  auto model = Load(request, script);
  INFO((model.ok() ? "" : model.error().message));
  REQUIRE(model.ok());
  return std::move(*model);
}

}  // namespace

TEST_CASE("Load: equal storages of a model are stored once, equal samples are not enough",
          "[unit]") {
  const std::string big = Noise(300000, 1);
  std::string near_twin = big;
  near_twin[5000] ^= 1;  // not where the sample looks
  CHECK(SampleStorage(std::as_bytes(std::span(big))) ==
        SampleStorage(std::as_bytes(std::span(near_twin))));
  const TempDir dir;
  const LoadedModel model =
      MustLoad({.paths = {dir.Write("x", Bytes8File({{"a", big}, {"b", near_twin}, {"c", big}}))}});
  const auto storage = [&](const char* name) {
    return model.manifest().storages()[model.Tensor(name).storage];
  };
  CHECK(model.Tensor("a").storage != model.Tensor("c").storage);
  CHECK(storage("a").offset_bytes == storage("c").offset_bytes);
  CHECK(storage("a").offset_bytes != storage("b").offset_bytes);
  CHECK(model.Raw("a") == big);
  CHECK(model.Raw("b") == near_twin);
  CHECK(model.Raw("c") == big);
  CHECK(model.manifest().PayloadBytes() == 600000);
}

TEST_CASE("Load: digests and samples of the manifest are those of the bytes", "[unit]") {
  const TempDir dir;
  const LoadedModel model =
      MustLoad({.paths = {dir.Write("x", Bytes8File({{"empty", ""},
                                                     {"small", Noise(100, 1)},
                                                     {"middle", Noise(20000, 2)},
                                                     {"large", Noise((5U << 20U) + 13, 3)}}))}});
  for (std::uint32_t i = 0; i < model.manifest().storages().size(); ++i) {
    const StorageRecord& record = model.manifest().storages()[i];
    const Digest digest = HashStorage(model.StorageBytes(i));
    const Digest sample = SampleStorage(model.StorageBytes(i));
    CHECK(std::memcmp(record.digest, digest.bytes.data(), 16) == 0);
    CHECK(std::memcmp(record.sample, sample.bytes.data(), 16) == 0);
  }
}

TEST_CASE("Load: storages are borrowed from another model after their bytes were compared",
          "[unit]") {
  const std::string shared = Noise(1U << 20U, 7);
  std::string other = Noise(1U << 20U, 8);
  const TempDir dir;
  const LoadedModel lender =
      MustLoad({.paths = {dir.Write("base", Bytes8File({{"w", shared}, {"v", other}}))}});
  other[5000] ^= 1;
  const std::string path =
      dir.Write("tuned", Bytes8File({{"w2", shared}, {"v", other}, {"new", Noise(70000, 9)}}));
  DaemonScript script;
  script.lender = &lender;
  const LoadedModel borrower = MustLoad({.paths = {path}}, script);
  CHECK(borrower.manifest().arenas().size() == 2);
  CHECK(borrower.Raw("w2") == shared);
  CHECK(borrower.Raw("v") == other);
  CHECK(borrower.manifest().storages()[borrower.Tensor("w2").storage].arena == 0);
  CHECK(borrower.manifest().storages()[borrower.Tensor("v").storage].arena == 1);
  const JobOutcome outcome = RunLoadJob({.paths = {path}}, script);
  REQUIRE(outcome.reserved.size() == 1);
  CHECK(outcome.reserved[0].charge_bytes < (1U << 20U) + 90000);
  SECTION("not when the job forbids it") {
    const LoadedModel alone = MustLoad({.paths = {path}, .share = false}, script);
    CHECK(alone.manifest().arenas().size() == 1);
  }
}

TEST_CASE("Load: a sliver of a large arena is not borrowed", "[unit]") {
  const std::string sliver = Noise(64U << 10U, 1);
  const TempDir dir;
  const LoadedModel lender = MustLoad(
      {.paths = {dir.Write("base", Bytes8File({{"w", Noise(40U << 20U, 2)}, {"s", sliver}}))}});
  DaemonScript script;
  script.lender = &lender;
  const LoadedModel model =
      MustLoad({.paths = {dir.Write("x", Bytes8File({{"s", sliver}}))}}, script);
  CHECK(model.manifest().arenas().size() == 1);
  CHECK(model.Raw("s") == sliver);
}

TEST_CASE("Load: what is charged is what the kernel allocates", "[unit]") {
  const TempDir dir;
  const std::string path = dir.Write(
      "x",
      Bytes8File({{"a", Noise(3U << 20U, 1)}, {"b", Noise(777, 2)}, {"c", Noise(5U << 20U, 3)}}));
  JobOutcome outcome = RunLoadJob({.paths = {path}, .arena_max_bytes = 4U << 20U});
  REQUIRE(outcome.result.ok());
  CHECK(outcome.reserved.size() > 1);
  std::uint64_t charged = 0;
  for (const ReserveArena& arena : outcome.reserved) {
    charged += arena.charge_bytes;
  }
  const auto model = LoadedModel::Make(std::move(outcome.arenas));
  REQUIRE(model.ok());
  CHECK(model->AllocatedBytes() == charged);
  CHECK(outcome.bytes_read == (8U << 20U) + 777);
}

TEST_CASE("Load: a refused reservation is the load's error, with both numbers", "[unit]") {
  const TempDir dir;
  DaemonScript script;
  script.budget_bytes = 1000;
  const auto model = Load({.paths = {dir.Write("x", Bytes8File({{"a", Noise(9000, 1)}}))}}, script);
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kNoRoom);
  CHECK_THAT(model.error().message, Contains("budget 1000"));
}

TEST_CASE("F2: a file that changes while it is read is never committed", "[unit]") {
  const TempDir dir;
  const std::string bytes = Bytes8File({{"a", Noise(3U << 20U, 1)}});
  const std::string path = dir.Write("x", bytes);
  DaemonScript script;
  SECTION("written in place, times restored") {
    script.on_reserve = [&] {
      struct stat before = {};
      REQUIRE(::stat(path.c_str(), &before) == 0);
      const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
      CHECK(::pwrite(fd, "!", 1, 1000) == 1);
      const timespec times[2] = {before.st_atim, before.st_mtim};
      CHECK(::futimens(fd, times) == 0);
      CHECK(::close(fd) == 0);
    };
  }
  SECTION("cut short") {
    script.on_reserve = [&] { CHECK(::truncate(path.c_str(), 5000) == 0); };
  }
  const auto model = Load({.paths = {path}}, script);
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kFileChanged);
  CHECK_THAT(model.error().message, Contains(path));
}

TEST_CASE("F2: a file cut short under a loader process is an error, not a signal", "[unit]") {
  const TempDir dir;
  const std::string path = dir.Write("x", Bytes8File({{"a", Noise(3U << 20U, 1)}}));
  DaemonScript script;
  script.on_reserve = [&] { CHECK(::truncate(path.c_str(), 5000) == 0); };
  const JobOutcome outcome = RunLoadJob({.paths = {path}, .in_process = false}, script);
  REQUIRE_FALSE(outcome.result.ok());
  CHECK(outcome.result.error().code == ErrorCode::kFileChanged);
  CHECK(outcome.exit_status == 1);
}

TEST_CASE("Load: an index is followed to the letter", "[unit]") {
  const TempDir dir;
  const std::string one = dir.Write("one.safetensors", Bytes8File({{"a", "11"}, {"stray", "99"}}));
  const std::string two = dir.Write("two.safetensors", Bytes8File({{"b", "22"}, {"a", "00"}}));
  const auto index = [&](const std::string& map) {
    return dir.Write("model.safetensors.index.json",
                     R"({"metadata":{"total_size":4},"weight_map":{)" + map + "}}");
  };
  SECTION("both shards, nothing that was not named") {
    const LoadedModel model =
        MustLoad({.paths = {index(R"("a":"one.safetensors","b":"two.safetensors")"), one, two}});
    CHECK(model.Raw("a") == "11");
    CHECK(model.Raw("b") == "22");
    CHECK_FALSE(model.Has("stray"));
    CHECK_THAT(std::string(model.manifest().metadata_json()),
               Contains(R"("index_metadata":{"total_size":4})"));
  }
  SECTION("A15: a shard that is missing is named") {
    const auto model =
        Load({.paths = {index(R"("a":"one.safetensors","b":"two.safetensors")"), one}});
    REQUIRE_FALSE(model.ok());
    CHECK_THAT(model.error().message, Contains("missing: two.safetensors"));
  }
  SECTION("A16a: a tensor its shard lacks is named with the shard") {
    const auto model = Load({.paths = {index(R"("b":"one.safetensors")"), one}});
    REQUIRE_FALSE(model.ok());
    CHECK_THAT(model.error().message, Contains("'b'") && Contains("'one.safetensors'"));
  }
  SECTION("A16c: a shard outside the folder is refused") {
    for (const char* name : {"../outside.safetensors", "..", "/etc/passwd", ""}) {
      const auto model = Load({.paths = {index(R"("a":")" + std::string(name) + "\""), one}});
      REQUIRE_FALSE(model.ok());
      CHECK_THAT(model.error().message, Contains("not a file of the same folder"));
    }
  }
  SECTION("malformed ones are errors") {
    for (const std::string& text :
         {std::string("{}"), std::string("{"), std::string(R"({"weight_map":[]})"),
          std::string(R"({"weight_map":{"a":1}})"),
          "{\"weight_map\":" + std::string(100000, '[')}) {
      CHECK_FALSE(Load({.paths = {dir.Write("i.json", text), one}}).ok());
    }
  }
}

TEST_CASE("Load: several safetensors files without an index are one model", "[unit]") {
  const TempDir dir;
  const std::string one = dir.Write("one.safetensors", Bytes8File({{"a", "11"}, {"b", "22"}}));
  const std::string two = dir.Write("two.safetensors", Bytes8File({{"c", "33"}}));
  SECTION("all tensors of all files, in their order") {
    const LoadedModel model = MustLoad({.paths = {one, two}});
    CHECK(model.Names() == std::vector<std::string>{"a", "b", "c"});
    CHECK(model.Raw("a") == "11");
    CHECK(model.Raw("c") == "33");
    CHECK(model.manifest().format() == "safetensors");
  }
  SECTION("a name in two files is an error that names both") {
    const std::string again = dir.Write("again.safetensors", Bytes8File({{"b", "44"}}));
    const auto model = Load({.paths = {one, two, again}});
    REQUIRE_FALSE(model.ok());
    CHECK(model.error().code == ErrorCode::kBadFile);
    CHECK_THAT(model.error().message, Contains("'b'") && Contains(one) && Contains(again));
  }
  SECTION("a file of another kind is named") {
    const std::string json = dir.Write("x.index.json", R"({"weight_map":{}})");
    const auto index = Load({.paths = {one, json}});
    REQUIRE_FALSE(index.ok());
    CHECK_THAT(index.error().message, Contains(json) && Contains("must be the first"));
    const std::string text = dir.Write("two.bin", "no model at all");
    const auto other = Load({.paths = {one, text}});
    REQUIRE_FALSE(other.ok());
    CHECK(other.error().code == ErrorCode::kBadFile);
    CHECK_THAT(other.error().message, Contains(text));
  }
  SECTION("another format than safetensors is not merged") {
    const auto model = Load({.paths = {one, two}, .format = "torch"});
    REQUIRE_FALSE(model.ok());
    CHECK_THAT(model.error().message, Contains("torch was asked for"));
  }
}

TEST_CASE("Verify: arenas and disk are compared byte by byte", "[unit]") {
  const TempDir dir;
  const std::string a = Noise(3U << 20U, 1);
  const std::string path = dir.Write("x", Bytes8File({{"a", a}, {"b", Noise(100, 2)}}));
  const LoadedModel model = MustLoad({.paths = {path}});
  SECTION("the same") {
    const JobOutcome outcome = RunVerifyJob(model);
    REQUIRE(outcome.verified);
    CHECK(outcome.verified->ok);
    CHECK(outcome.verified->disk == "same");
    CHECK(outcome.verified->storages == 2);
    CHECK(outcome.verified->bytes == (3U << 20U) + 100);
  }
  SECTION("another byte on disk") {
    std::string changed = a;
    changed.back() = static_cast<char>(changed.back() + 1);
    (void)dir.Write("x", Bytes8File({{"a", changed}, {"b", Noise(100, 2)}}));
    const JobOutcome outcome = RunVerifyJob(model);
    REQUIRE(outcome.verified);
    CHECK_FALSE(outcome.verified->ok);
    CHECK(outcome.verified->disk == "differs");
    REQUIRE(outcome.verified->differences.size() == 1);
    CHECK_THAT(outcome.verified->differences[0], Contains("'a'"));
  }
  SECTION("other tensors on disk") {
    (void)dir.Write("x", Bytes8File({{"a", a}, {"c", "x"}}));
    const JobOutcome outcome = RunVerifyJob(model);
    REQUIRE(outcome.verified);
    CHECK(outcome.verified->differences.size() == 2);
  }
  SECTION("no file") {
    std::filesystem::remove(path);
    const JobOutcome outcome = RunVerifyJob(model);
    REQUIRE(outcome.verified);
    CHECK(outcome.verified->ok);
    CHECK(outcome.verified->disk == "unavailable");
  }
}

TEST_CASE("Collapse: costs no memory and changes no byte", "[unit]") {
  const TempDir dir;
  const std::string a = Noise(9U << 20U, 1);
  const LoadedModel model =
      MustLoad({.paths = {dir.Write("x", Bytes8File({{"a", a}, {"b", "b"}}))}});
  const std::uint64_t before = model.AllocatedBytes();
  JobRequest job;
  job.kind = JobKind::kCollapse;
  job.arenas = model.ArenaRefs();
  std::vector<int> descriptors;
  const auto arenas = model.DuplicateArenas();
  for (const UniqueFd& fd : arenas) {
    descriptors.push_back(fd.get());
  }
  const JobOutcome outcome = RunProcess(job, descriptors);
  CHECK(outcome.exit_status == 0);
  CHECK(model.AllocatedBytes() == before);
  CHECK(model.Raw("a") == a);
}

TEST_CASE("Load: in a process, private memory stays small whatever the model's size", "[unit]") {
  constexpr std::uint64_t kSize = 600U << 20U;
  const TempDir dir;
  const std::string path = dir / "x";
  {
    std::ofstream file(path, std::ios::binary);
    file << SafetensorsFile(R"({"a":{"dtype":"U8","shape":[)" + std::to_string(kSize) +
                                R"(],"data_offsets":[0,)" + std::to_string(kSize) + "]}}",
                            "");
    const std::string block = Noise(1U << 20U, 3);
    for (std::uint64_t at = 0; at < kSize; at += block.size()) {
      file << block;
    }
  }
  const JobOutcome outcome = RunLoadJob({.paths = {path}, .in_process = false});
  REQUIRE(outcome.result.ok());
  CHECK(outcome.exit_status == 0);
  CHECK(outcome.progress_events > 0);
  CHECK(outcome.peak_private_kib > 0);
  CHECK(outcome.peak_private_kib < 70 * 1024);
}

TEST_CASE("Loader: a broken job or a daemon that goes away ends it with an exit status", "[unit]") {
  JobRequest job;
  job.files = {{"x", "/x"}};
  const JobOutcome outcome = RunProcess(job, {});
  CHECK(outcome.exit_status == 1);
  REQUIRE_FALSE(outcome.result.ok());
  CHECK_THAT(outcome.result.error().message, Contains("0 descriptors"));
}

}  // namespace modelcache
