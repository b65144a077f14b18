// Manifests: round trip, look-up, and every damage noticed.
#include "proto/manifest.h"

#include <cstring>
#include <string>
#include <vector>

#include "proto/manifest_internal.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

ManifestSpec SomeSpec() {
  ManifestSpec spec;
  spec.format = "torch";
  spec.metadata_json = R"({"metadata":{"k":"v"}})";
  spec.arenas = {{*ArenaId::FromHex("ffeeddccbbaa99887766554433221100"), 1U << 20U}};
  spec.storages = {{0, 4096, 48, {}, {}}, {0, 4160, 4, {}, {}}};
  spec.tensors = {{"b", Dtype::kFloat32, {3, 4}, {4, 1}, 0, 0, kTensorRequiresGrad},
                  {"a", Dtype::kFloat32, {4, 3}, {1, 4}, 0, 0, 0},
                  {"c.x", Dtype::kInt32, {}, {}, 1, 0, 0},
                  {"meta", Dtype::kFloat64, {5}, {1}, kNoStorage, 0, 0},
                  {"empty", Dtype::kFloat32, {2, 0}, {1, 1}, 1, 4, 0}};
  return spec;
}

// 8-byte aligned copy, as a manifest in an arena is.
struct Aligned {
  explicit Aligned(const std::string& text) : words((text.size() + 7) / 8), size(text.size()) {
    std::memcpy(words.data(), text.data(), text.size());
  }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return std::as_bytes(std::span(words)).first(size);
  }
  std::vector<std::uint64_t> words;
  std::size_t size;
};

// As EncodeManifest, after `change` has edited the bytes and the checksum was made good again.
template <typename Change>
Result<Manifest> ParseChanged(Change change) {
  static std::vector<Aligned> kept;  // a Manifest only views its bytes
  std::string bytes = EncodeManifest(SomeSpec()).value();
  change(bytes);
  const Digest digest = ManifestDigest(std::as_bytes(std::span(bytes)));
  std::memcpy(&bytes[offsetof(ManifestHeader, digest)], digest.bytes.data(), 16);
  kept.emplace_back(bytes);
  return Manifest::Parse(kept.back().bytes());
}

template <typename Record, typename Edit>
Result<Manifest> ParseEdited(std::uint64_t ManifestHeader::*section, Edit edit) {
  return ParseChanged([&](std::string& bytes) {
    ManifestHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    Record record;
    std::memcpy(&record, &bytes[header.*section], sizeof record);
    edit(record);
    std::memcpy(&bytes[header.*section], &record, sizeof record);
  });
}

TEST_CASE("Manifest: what a loader says is what a client reads", "[unit]") {
  const std::string bytes = EncodeManifest(SomeSpec()).value();
  CHECK(bytes.size() == ManifestBytes(SomeSpec(), 1));
  const Aligned aligned(bytes);
  const auto manifest = Manifest::Parse(aligned.bytes());
  REQUIRE(manifest.ok());
  CHECK(manifest->format() == "torch");
  CHECK(manifest->metadata_json() == SomeSpec().metadata_json);
  REQUIRE(manifest->tensors().size() == 5);
  const TensorRecord& b = manifest->tensors()[0];
  CHECK(manifest->Name(b) == "b");
  CHECK(manifest->Shape(b)[1] == 4);
  CHECK(manifest->Stride(b)[0] == 4);
  CHECK(b.extent_bytes == 48);
  CHECK(b.flags == kTensorRequiresGrad);
  CHECK(manifest->tensors()[3].storage == kNoStorage);
  CHECK(manifest->PayloadBytes() == 52);
}

TEST_CASE("Manifest: tensors are found by name, others are not", "[unit]") {
  const Aligned aligned(EncodeManifest(SomeSpec()).value());
  const auto manifest = Manifest::Parse(aligned.bytes());
  REQUIRE(manifest.ok());
  for (std::uint32_t i = 0; i < 5; ++i) {
    CHECK(manifest->Find(SomeSpec().tensors[i].name) == i);
  }
  CHECK_FALSE(manifest->Find("c"));
  CHECK_FALSE(manifest->Find("zzz"));
  CHECK_FALSE(manifest->Find(""));
}

TEST_CASE("Manifest: shared places are counted once", "[unit]") {
  ManifestSpec spec = SomeSpec();
  spec.storages.push_back(spec.storages[0]);
  const Aligned aligned(EncodeManifest(spec).value());
  CHECK(Manifest::Parse(aligned.bytes())->PayloadBytes() == 52);
}

TEST_CASE("Manifest: any flipped bit is noticed", "[unit]") {
  const std::string bytes = EncodeManifest(SomeSpec()).value();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Aligned aligned(bytes);
    reinterpret_cast<std::uint8_t*>(aligned.words.data())[i] ^= 4U;
    REQUIRE(Manifest::Parse(aligned.bytes()).error().code == ErrorCode::kCorrupt);
  }
}

TEST_CASE("Manifest: any shorter prefix is refused", "[unit]") {
  const Aligned aligned(EncodeManifest(SomeSpec()).value());
  for (std::size_t size = 0; size < aligned.size; ++size) {
    REQUIRE_FALSE(Manifest::Parse(aligned.bytes().first(size)).ok());
  }
}

TEST_CASE("Manifest: every field with a checksum made to fit is still checked", "[unit]") {
  using H = ManifestHeader;
  const auto storage = &H::storages_offset;
  const auto tensor = &H::tensors_offset;
  CHECK(ParseChanged([](std::string&) {}).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.arena = 1; }).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.offset_bytes = 0; }).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.offset_bytes = 4100; }).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.offset_bytes = ~63ULL; }).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.size_bytes = 1U << 20U; }).ok());
  CHECK_FALSE(ParseEdited<StorageRecord>(storage, [](auto& r) { r.size_bytes = 40; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.name_offset = ~0ULL; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.name_bytes = ~0U; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.storage = 2; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.data_offset_bytes = 4; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.data_offset_bytes = ~3ULL; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.extent_bytes = 4; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.dimensions_index = 999; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.dimension_count = 65; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.dtype = 0; }).ok());
  CHECK_FALSE(ParseEdited<TensorRecord>(tensor, [](auto& r) { r.dtype = 35; }).ok());
  CHECK_FALSE(ParseEdited<std::int64_t>(&H::dimensions_offset, [](auto& r) { r = -1; }).ok());
  CHECK_FALSE(
      ParseEdited<std::int64_t>(&H::dimensions_offset, [](auto& r) { r = 1LL << 62; }).ok());
  CHECK_FALSE(ParseEdited<std::uint32_t>(&H::order_offset, [](auto& r) { r = 0; }).ok());
  CHECK_FALSE(ParseEdited<std::uint32_t>(&H::order_offset, [](auto& r) { r = 5; }).ok());
}

TEST_CASE("Manifest: header offsets and counts that leave it are refused", "[unit]") {
  const auto refuse = [](auto edit) {
    return !ParseChanged([&](std::string& bytes) {
              ManifestHeader header;
              std::memcpy(&header, bytes.data(), sizeof header);
              edit(header);
              std::memcpy(bytes.data(), &header, sizeof header);
            }).ok();
  };
  CHECK(refuse([](auto& h) { h.tensor_count = ~0U; }));
  CHECK(refuse([](auto& h) { h.storage_count = ~0U; }));
  CHECK(refuse([](auto& h) { h.arena_count = 0; }));
  CHECK(refuse([](auto& h) { h.dimension_count = ~0U; }));
  CHECK(refuse([](auto& h) { h.tensors_offset = ~7ULL; }));
  CHECK(refuse([](auto& h) { h.storages_offset += 1; }));
  CHECK(refuse([](auto& h) { h.metadata_bytes = ~0ULL; }));
  CHECK(refuse([](auto& h) { h.format_offset = ~0ULL; }));
  CHECK(refuse([](auto& h) { h.version = 2; }));
  CHECK(refuse([](auto& h) { h.total_bytes += 8; }));
}

TEST_CASE("Manifest: a loader's wrong tensors are refused by name with both numbers", "[unit]") {
  const auto message = [](auto edit) {
    ManifestSpec spec = SomeSpec();
    edit(spec.tensors[0]);
    const auto encoded = EncodeManifest(spec);
    REQUIRE_FALSE(encoded.ok());
    CHECK(encoded.error().code == ErrorCode::kBadFile);
    return encoded.error().message;
  };
  const std::string too_large = message([](TensorSpec& t) { t.shape = {3, 5}; });
  CHECK_THAT(too_large, Contains("'b'"));
  CHECK_THAT(too_large, Contains("52 bytes") && Contains("has 48"));
  CHECK_THAT(message([](TensorSpec& t) { t.shape = {-1, 4}; }), Contains("size -1"));
  CHECK_THAT(message([](TensorSpec& t) {
               t.shape = {1LL << 40, 1LL << 40};
               t.stride = {1LL << 40, 1};
             }),
             Contains("overflow"));
  CHECK_THAT(message([](TensorSpec& t) { t.storage = 9; }), Contains("storage 9 of 2"));
  CHECK_THAT(message([](TensorSpec& t) { t.name = "a"; }), Contains("twice"));
  CHECK_THAT(message([](TensorSpec& t) { t.stride = {1}; }), Contains("2 sizes and 1 strides"));
  CHECK_THAT(message([](TensorSpec& t) { t.name = std::string("x\0y", 3); }),
             Contains("zero byte"));
  CHECK_THAT(message([](TensorSpec& t) { t.name = "\xFF"; }), Contains("not UTF-8"));
}

TEST_CASE("Manifest: extents of views", "[unit]") {
  const auto extent = [](std::vector<std::int64_t> shape, std::vector<std::int64_t> stride,
                         Dtype dtype) {
    return TensorExtentBytes({"t", dtype, std::move(shape), std::move(stride), 0, 0, 0}).value();
  };
  CHECK(extent({}, {}, Dtype::kFloat64) == 8);
  CHECK(extent({0}, {1}, Dtype::kFloat32) == 0);
  CHECK(extent({2, 3}, {1, 10}, Dtype::kInt16) == 44);
  CHECK(extent({5}, {0}, Dtype::kUint8) == 1);
  CHECK(extent({4}, {1}, Dtype::kFloat6E2m3) == 3);
  CHECK(ContiguousStride(std::vector<std::int64_t>{2, 0, 3}) == std::vector<std::int64_t>{3, 3, 1});
}

TEST_CASE("Dtype: names and numbers agree both ways", "[unit]") {
  for (std::uint16_t number = 1; number <= kDtypeCount; ++number) {
    const auto dtype = static_cast<Dtype>(number);
    CHECK(DtypeBits(dtype) > 0);
    CHECK(DtypeFromName(DtypeName(dtype)) == dtype);
  }
  CHECK(DtypeBits(static_cast<Dtype>(35)) == 0);
  CHECK(DtypeName(static_cast<Dtype>(0)).empty());
  CHECK_FALSE(DtypeFromName("float128"));
}

}  // namespace
}  // namespace modelcache
