// Maps of arenas that are right, and of every kind that is not.
#include "client/attach.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "common/memfd.h"
#include "proto/manifest_internal.h"
#include "tests/support/arena_builder.h"
#include "tests/support/catch.h"
#include "tests/support/temp_dir.h"

using namespace modelcache;

namespace {

// The arenas of this very process, as a client would open them.
Result<UniqueFd> OpenOwn(const BuiltModel& model, std::size_t index) {
  return OpenThroughProcfs(::getpid(), model.reply.arenas[index].fd);
}

Result<MappedModel> Map(const BuiltModel& model) {
  return MapModel(model.reply, [&](std::size_t index) { return OpenOwn(model, index); });
}

// The error of mapping `model`; fails the test when there is none.
Error ErrorOf(const BuiltModel& model) {
  Result<MappedModel> mapped = Map(model);
  REQUIRE_FALSE(mapped.ok());
  return std::move(mapped).error();
}

float* Data(const MappedModel& model, std::size_t storage) {
  return static_cast<float*>(model.storage_data[storage]);
}

}  // namespace

TEST_CASE("Attach: storages are mapped private and hold what was stored", "[unit]") {
  const BuiltModel built = BuildModel({Floats("a", 100, 1), Floats("b", 5, 50)});
  Result<MappedModel> first = Map(built);
  Result<MappedModel> second = Map(built);
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  CHECK(Data(*first, 0)[99] == 100);
  CHECK(Data(*first, 1)[0] == 50);
  CHECK(first->manifest.Find("b") == 1U);
  Data(*first, 0)[0] = -1;
  CHECK(Data(*second, 0)[0] == 1);
}

TEST_CASE("Attach: several arenas, the manifest in the last", "[unit]") {
  BuildOptions options;
  options.arena_max_bytes = 4U << 20U;
  const BuiltModel built =
      BuildModel({Floats("a", 700'000, 0), Floats("b", 700'000, 5), Floats("c", 3, 9)}, options);
  REQUIRE(built.arenas.size() > 1);
  Result<MappedModel> mapped = Map(built);
  REQUIRE(mapped.ok());
  CHECK(Data(*mapped, 1)[699'999] == 5 + 699'999);
  CHECK(Data(*mapped, 2)[2] == 11);
}

TEST_CASE("Attach: storages that share a place are separately writable", "[unit]") {
  BuildOptions options;
  options.edit_spec = [](ManifestSpec& spec) {
    spec.storages[1].arena = spec.storages[0].arena;
    spec.storages[1].offset_bytes = spec.storages[0].offset_bytes;
  };
  const BuiltModel built = BuildModel({Floats("a", 64, 3), Floats("b", 64, 3)}, options);
  for (int round = 0; round < 2; ++round) {  // the second time from what was remembered
    Result<MappedModel> mapped = Map(built);
    REQUIRE(mapped.ok());
    CHECK(mapped->facts->payload_bytes == 256);
    CHECK(Data(*mapped, 0) != Data(*mapped, 1));
    Data(*mapped, 0)[0] = -1;
    CHECK(Data(*mapped, 1)[0] == 3);
  }
}

TEST_CASE("Attach: a model without tensors and a tensor without bytes", "[unit]") {
  CHECK(Map(BuildModel({})).ok());
  const BuiltModel built = BuildModel({Floats("empty", 0, 0)});
  Result<MappedModel> mapped = Map(built);
  REQUIRE(mapped.ok());
  CHECK(mapped->storage_data[0] != nullptr);
}

TEST_CASE("Attach: a manifest is validated once per process and arena", "[unit]") {
  const BuiltModel built = BuildModel({Floats("a", 4, 1)});
  Result<MappedModel> first = Map(built);
  Result<MappedModel> second = Map(built);
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  CHECK(first->facts == second->facts);
}

TEST_CASE("Attach: one arena is open at a time and none stays open", "[unit]") {
  BuildOptions options;
  options.arena_max_bytes = 4U << 20U;
  const BuiltModel built = BuildModel({Floats("a", 900'000, 0), Floats("b", 900'000, 0)}, options);
  const int before = ::dup(built.arenas[0].get());
  REQUIRE(before >= 0);
  (void)::close(before);
  std::set<int> numbers;
  Result<MappedModel> mapped = MapModel(built.reply, [&](std::size_t index) {
    Result<UniqueFd> fd = OpenOwn(built, index);
    numbers.insert(fd.ok() ? fd->get() : -1);
    return fd;
  });
  REQUIRE(mapped.ok());
  CHECK(numbers == std::set<int>{before});
  const int after = ::dup(built.arenas[0].get());
  CHECK(after == before);
  (void)::close(after);
}

TEST_CASE("Attach: an ordinary file is refused (G4 a)", "[unit]") {
  const TempDir dir;
  const std::string path = dir.Write("file", std::string(8192, 'x'));
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  BuiltModel built = BuildModel({Floats("a", 4, 1)});
  built.reply.arenas[0].fd = fd.get();
  const Error error = ErrorOf(built);
  CHECK(error.code == ErrorCode::kCorrupt);
  CHECK_THAT(error.message, Contains("arena 0") && Contains("memfd"));
}

TEST_CASE("Attach: a memfd smaller than told is refused (G4 b)", "[unit]") {
  BuiltModel built = BuildModel({Floats("a", 4, 1)});
  built.reply.arenas[0].size_bytes *= 2;
  const Error error = ErrorOf(built);
  CHECK(error.code == ErrorCode::kCorrupt);
  CHECK_THAT(error.message, Contains("size is") && Contains("the daemon said"));
}

TEST_CASE("Attach: an unsealed memfd is refused before it is read (G4 c)", "[unit]") {
  BuildOptions options;
  options.seal = false;
  const Error error = ErrorOf(BuildModel({Floats("a", 4, 1)}, options));
  CHECK(error.code == ErrorCode::kCorrupt);
  CHECK_THAT(error.message, Contains("not sealed"));
}

TEST_CASE("Attach: offsets and lengths outside of the arena are refused (G4 d)", "[unit]") {
  struct Case {
    std::uint64_t offset;
    std::uint64_t size;
  };
  for (const Case& bad : {Case{~0ULL, 16}, Case{4096, 1ULL << 63U}, Case{4097, 16}, Case{0, 16}}) {
    BuildOptions options;
    options.edit_manifest = [&](std::string& bytes) {
      ManifestHeader header;
      std::memcpy(&header, bytes.data(), sizeof header);
      StorageRecord record;
      std::memcpy(&record, &bytes[header.storages_offset], sizeof record);
      record.offset_bytes = bad.offset;
      record.size_bytes = bad.size;
      std::memcpy(&bytes[header.storages_offset], &record, sizeof record);
      // The checksum is made to fit: a liar would.
      const Digest digest = ManifestDigest(std::as_bytes(std::span(bytes)));
      std::memcpy(&bytes[offsetof(ManifestHeader, digest)], digest.bytes.data(), 16);
    };
    const Error error = ErrorOf(BuildModel({Floats("a", 4, 1)}, options));
    CHECK(error.code == ErrorCode::kCorrupt);
    CHECK_THAT(error.message, Contains("storage 0"));
  }
}

TEST_CASE("Attach: a damaged manifest is refused", "[unit]") {
  BuildOptions options;
  options.edit_manifest = [](std::string& bytes) { bytes[bytes.size() / 2] ^= 1; };
  CHECK_THAT(ErrorOf(BuildModel({Floats("a", 4, 1)}, options)).message, Contains("checksum"));
}

TEST_CASE("Attach: header pages that do not fit the reply are refused", "[unit]") {
  const auto with = [](const std::function<void(ArenaHeader&)>& edit) {
    BuildOptions options;
    options.edit_header = edit;
    return ErrorOf(BuildModel({Floats("a", 4, 1)}, options));
  };
  CHECK_THAT(with([](ArenaHeader& h) { h.arena_id.bytes[0] ^= 1; }).message, Contains("arena id"));
  CHECK_THAT(with([](ArenaHeader& h) { h.model_id.bytes[0] ^= 1; }).message, Contains("model id"));
  CHECK(with([](ArenaHeader& h) { h.arena_bytes += 4096; }).code == ErrorCode::kCorrupt);
  CHECK(with([](ArenaHeader& h) { h.manifest.offset_bytes = 1ULL << 62U; }).code ==
        ErrorCode::kCorrupt);
  CHECK(with([](ArenaHeader& h) { h.manifest.size_bytes = 0; }).code == ErrorCode::kCorrupt);
}

TEST_CASE("Attach: replies whose fields are wrong are refused", "[unit]") {
  const auto with = [](const std::function<void(OpenReply&)>& edit) {
    BuiltModel built = BuildModel({Floats("a", 4, 1)});
    edit(built.reply);
    return ErrorOf(built);
  };
  CHECK(with([](OpenReply& r) { r.arenas.clear(); }).code == ErrorCode::kProtocol);
  CHECK(with([](OpenReply& r) { r.lease = 0; }).code == ErrorCode::kProtocol);
  CHECK_THAT(with([](OpenReply& r) { r.arenas[0].inode ^= 1; }).message, Contains("inode is"));
  CHECK_THAT(with([](OpenReply& r) { r.arenas[0].id.bytes[3] ^= 1; }).message,
             Contains("arena id"));
  CHECK_THAT(with([](OpenReply& r) { r.model_id.bytes[3] ^= 1; }).message, Contains("model id"));
  CHECK(with([](OpenReply& r) { r.arenas[0].fd = -1; }).code == ErrorCode::kNotFound);
  CHECK(with([](OpenReply& r) { r.arenas[0].fd = 1 << 30; }).code == ErrorCode::kNotFound);
  CHECK(with([](OpenReply& r) { r.arenas.push_back(r.arenas[0]); }).code == ErrorCode::kCorrupt);
}

TEST_CASE("Attach: a pipe behind the number neither blocks nor passes", "[unit]") {
  int ends[2] = {-1, -1};
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  BuiltModel built = BuildModel({Floats("a", 4, 1)});
  built.reply.arenas[0].fd = reader.get();
  CHECK(ErrorOf(built).code == ErrorCode::kCorrupt);
}
