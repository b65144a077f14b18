// Layout of storages in arenas, and the header page.
#include <cstring>
#include <vector>

#include "common/checked_math.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMiB = 1U << 20U;

TEST_CASE("Layout: small storages are packed, large ones start on 2 MiB boundaries", "[unit]") {
  const std::vector<std::uint64_t> sizes = {100, 3 * kMiB, 1, 2 * kMiB};
  const auto layout = PlanLayout(sizes, 500, kDefaultArenaMaxBytes);
  REQUIRE(layout.ok());
  REQUIRE(layout->arenas.size() == 1);
  CHECK(layout->placements[0].offset_bytes == 4096);
  CHECK(layout->placements[2].offset_bytes == 4096 + 128);
  CHECK(layout->placements[1].offset_bytes == 2 * kMiB);
  CHECK(layout->placements[3].offset_bytes == 6 * kMiB);
  CHECK(layout->manifest_offset_bytes == 8 * kMiB);
  CHECK(layout->arenas[0].size_bytes == 8 * kMiB + 4096);
  // header, one page of small storages, 5 MiB, one page of manifest: holes cost nothing
  CHECK(layout->arenas[0].charge_bytes == 4096 + 4096 + 5 * kMiB + 4096);
}

TEST_CASE("Layout: no storage and empty storages still give an arena with a manifest", "[unit]") {
  const auto none = PlanLayout({}, 200, kDefaultArenaMaxBytes);
  REQUIRE(none.ok());
  CHECK(none->arenas.size() == 1);
  CHECK(none->arenas[0].size_bytes == 8192);
  const std::vector<std::uint64_t> empty = {0, 0};
  const auto layout = PlanLayout(empty, 200, kDefaultArenaMaxBytes);
  REQUIRE(layout.ok());
  CHECK(layout->arenas[0].charge_bytes == 8192);
}

TEST_CASE("Layout: arenas stay below their limit, a larger storage gets its own", "[unit]") {
  std::vector<std::uint64_t> sizes(40, kMiB);
  sizes.insert(sizes.begin() + 20, 20 * kMiB);
  const auto layout = PlanLayout(sizes, 1000, 8 * kMiB);
  REQUIRE(layout.ok());
  std::vector<std::uint64_t> used(layout->arenas.size(), 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Placement& place = layout->placements[i];
    REQUIRE(place.arena < layout->arenas.size());
    CHECK(Within({place.offset_bytes, sizes[i]}, layout->arenas[place.arena].size_bytes));
    ++used[place.arena];
  }
  for (std::size_t i = 0; i < layout->arenas.size(); ++i) {
    const bool holds_large = layout->placements[20].arena == i;
    CHECK((layout->arenas[i].size_bytes <= 8 * kMiB) != holds_large);
    CHECK((used[i] > 0 || i + 1 == layout->arenas.size()));
  }
}

TEST_CASE("Layout: no two storages overlap, whatever their sizes", "[unit]") {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t i = 0; i < 300; ++i) {
    sizes.push_back(i * 7919 * (i % 7 == 0 ? 97 : 1) % (5 * kMiB));
  }
  const auto layout = PlanLayout(sizes, 4000, 16 * kMiB);
  REQUIRE(layout.ok());
  for (std::size_t a = 0; a < sizes.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      const Placement& x = layout->placements[a];
      const Placement& y = layout->placements[b];
      const bool apart = x.arena != y.arena || x.offset_bytes + sizes[a] <= y.offset_bytes ||
                         y.offset_bytes + sizes[b] <= x.offset_bytes;
      REQUIRE(apart);
    }
  }
}

TEST_CASE("Layout: impossible sizes are refused", "[unit]") {
  const std::vector<std::uint64_t> huge = {UINT64_MAX, UINT64_MAX};
  CHECK(PlanLayout(huge, 1, kDefaultArenaMaxBytes).error().code == ErrorCode::kInvalidArgument);
  CHECK_FALSE(PlanLayout({}, UINT64_MAX, kDefaultArenaMaxBytes).ok());
  CHECK_FALSE(PlanLayout({}, 1, 4096).ok());
}

ArenaHeader SomeHeader() {
  ArenaHeader header;
  header.arena_id.bytes.fill(1);
  header.model_id.bytes.fill(2);
  header.arena_index = 1;
  header.arena_count = 2;
  header.arena_bytes = 1U << 20U;
  header.manifest = {8192, 4096};
  return header;
}

TEST_CASE("Arena header: what is written is read", "[unit]") {
  std::vector<std::byte> page(kArenaHeaderBytes);
  EncodeArenaHeader(SomeHeader(), page);
  const auto back = DecodeArenaHeader(page, 1U << 20U);
  REQUIRE(back.ok());
  CHECK(back->arena_id == SomeHeader().arena_id);
  CHECK(back->model_id == SomeHeader().model_id);
  CHECK(back->manifest.offset_bytes == 8192);
  CHECK(back->arena_index == 1);
}

TEST_CASE("Arena header: every changed byte is noticed", "[unit]") {
  std::vector<std::byte> page(kArenaHeaderBytes);
  EncodeArenaHeader(SomeHeader(), page);
  for (std::size_t i = 0; i < 96; ++i) {
    page[i] ^= std::byte{1};
    CHECK(DecodeArenaHeader(page, 1U << 20U).error().code == ErrorCode::kCorrupt);
    page[i] ^= std::byte{1};
  }
}

TEST_CASE("Arena header: sizes that disagree with the memfd are refused", "[unit]") {
  std::vector<std::byte> page(kArenaHeaderBytes);
  EncodeArenaHeader(SomeHeader(), page);
  CHECK_THAT(DecodeArenaHeader(page, 1U << 19U).error().message, Contains("1048576"));
  CHECK_FALSE(DecodeArenaHeader(std::span(page).first(100), 1U << 20U).ok());
  ArenaHeader outside = SomeHeader();
  outside.manifest = {1U << 20U, 8};
  EncodeArenaHeader(outside, page);
  CHECK_FALSE(DecodeArenaHeader(page, 1U << 20U).ok());
  ArenaHeader missing = SomeHeader();
  missing.manifest = {0, 0};
  EncodeArenaHeader(missing, page);
  CHECK_FALSE(DecodeArenaHeader(page, 1U << 20U).ok());
}

}  // namespace
}  // namespace modelcache
