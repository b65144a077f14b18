// Zip archives that two readers could understand differently, and damaged ones.
#include <string>

#include "tests/loader/loader_harness.h"
#include "tests/loader/pickle_builder.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

std::string CheckpointOf(float value) {
  return Checkpoint("\x80\x02}" + PickledText("w") + PickledTensor("0") + "s.",
                    {RawBytes(std::vector<float>{value})});
}

std::string ErrorOf(const std::string& bytes) {
  const TempDir dir;
  return LoadError(dir.Write("x.pt", bytes));
}

// With `count` bytes at `at` replaced by a little-endian number.
std::string Patched(std::string bytes, std::size_t at, std::uint64_t value, std::size_t count) {
  return bytes.replace(at, count, LittleEndian(value, count));
}

// The same archive with a 64-bit end record and its locator.
std::string WithLongEnd(const std::string& zip) {
  const std::size_t end = zip.rfind("PK\x05\x06");
  const auto directory_at = zip.find("PK\x01\x02");
  const std::string record = "PK\x06\x06" + LittleEndian(44, 8) + LittleEndian(0, 12) +
                             LittleEndian(2, 8) + LittleEndian(2, 8) +
                             LittleEndian(end - directory_at, 8) + LittleEndian(directory_at, 8);
  const std::string locator =
      "PK\x06\x07" + LittleEndian(0, 4) + LittleEndian(end, 8) + LittleEndian(1, 4);
  return zip.substr(0, end) + record + locator + zip.substr(end);
}

}  // namespace

TEST_CASE("Zip: an archive behind or in front of another is refused, never read as the other",
          "[unit]") {
  const std::string first = CheckpointOf(1);
  const std::string second = CheckpointOf(2);
  REQUIRE(ErrorOf(first) == "(loaded)");
  CHECK_THAT(ErrorOf(first + second), Contains("other data stands before the archive"));
  CHECK_THAT(ErrorOf(WithLongEnd(first) + second),
             Contains("other data stands before the archive"));
  CHECK_THAT(ErrorOf(first + WithLongEnd(second)), Contains("does not agree"));
  CHECK_THAT(ErrorOf(first + std::string(3000, 'x') + second),
             Contains("other data stands before"));
  CHECK_THAT(ErrorOf(first + "junk"), Contains("other data follows the archive"));
  CHECK_THAT(ErrorOf(first + std::string(70'000, 'x')),
             Contains("has no zip directory at its end"));
}

TEST_CASE("Zip: of two end records the last one counts, and must be whole", "[unit]") {
  const std::string good = CheckpointOf(1);
  const std::string end = good.substr(good.rfind("PK\x05\x06"));
  CHECK_THAT(ErrorOf(good + end), Contains("other data stands before the archive"));
  // One inside of the comment of the other: readers that look from the end take the inner one.
  CHECK_THAT(ErrorOf(Patched(good, good.size() - 2, end.size(), 2) + end),
             Contains("other data stands before"));
  CHECK_THAT(ErrorOf(Patched(good, good.size() - 2, 4, 2) + "PK\x05\x06"),
             Contains("it is cut short"));
  CHECK(ErrorOf(Patched(good, good.size() - 2, 5, 2) + "hello") == "(loaded)");
}

TEST_CASE("Zip: the 64-bit end record must say what the short one says", "[unit]") {
  const std::string good = WithLongEnd(CheckpointOf(1));
  const std::size_t record = good.rfind("PK\x06\x06");
  const std::size_t end = good.rfind("PK\x05\x06");
  CHECK(ErrorOf(good) == "(loaded)");
  CHECK(ErrorOf(Patched(good, end + 16, UINT32_MAX, 4)) == "(loaded)");
  CHECK_THAT(ErrorOf(Patched(good, record + 32, 1, 8)), Contains("does not agree"));
  CHECK_THAT(ErrorOf(Patched(good, record + 48, 0, 8)), Contains("does not agree"));
  CHECK_THAT(ErrorOf(Patched(good, record + 4, UINT64_MAX - 3, 8)), Contains("does not agree"));
  CHECK_THAT(ErrorOf(Patched(good, end - 12, UINT64_MAX, 8)), Contains("does not agree"));
  // A locator's four letters inside of a record are no locator.
  const TempDir dir;
  const std::string pickle = "\x80\x02}" + PickledText("PK\x06\x07") + PickledTensor("0") + "s.";
  CHECK(Load(dir.Write("x.pt", Checkpoint(pickle, {"PK\x06\x07"}))).ok());
}

TEST_CASE("Zip: counts, names and local headers must agree with the directory", "[unit]") {
  const std::string good = CheckpointOf(1);
  const std::size_t end = good.rfind("PK\x05\x06");
  CHECK_THAT(ErrorOf(Patched(good, end + 10, 1, 2)),
             Contains("lists 2 records") && Contains("says 1"));
  const std::size_t local = good.rfind("a/data/0", good.find("PK\x01\x02")) - 30;
  std::string other_name = good;
  other_name[local + 30 + 7] = '1';
  CHECK_THAT(ErrorOf(other_name), Contains("'a/data/0'") && Contains("local header"));
  CHECK_THAT(ErrorOf(Patched(good, local + 8, 8, 2)), Contains("local header"));
  CHECK_THAT(ErrorOf(Patched(good, local + 14, 7, 4)), Contains("local header"));
  CHECK_THAT(ErrorOf(Patched(good, local + 22, 7, 4)), Contains("local header"));
  CHECK_THAT(ErrorOf(Patched(good, local + 28, 4, 2)), Contains("but the directory starts at"));
  CHECK_THAT(ErrorOf(ZipFile({{"a/data.pkl", "\x80\x02N."}, {std::string("a/b\0c", 5), "x"}})),
             Contains("'a/b\\x00c' has a zero byte in its name"));
}

TEST_CASE("Zip: names that torch takes for one are refused in its archives", "[unit]") {
  const std::string pickle = "\x80\x02}" + PickledText("w") + PickledTensor("A") + "s.";
  CHECK_THAT(ErrorOf(ZipFile({{"a/data.pkl", pickle}, {"a/data/a", "1234"}, {"a/data/A", "5678"}})),
             Contains("'a/data/A' and 'a/data/a'") && Contains("case"));
}

TEST_CASE("Zip: records that share bytes are refused, shifted or not", "[unit]") {
  const std::string content = "0123456789";
  const std::string second = ZipFile({{"a/data/1", content}});
  const std::string local = second.substr(0, second.find("PK\x01\x02"));
  // The first record's content holds a whole record; the second entry points into it.
  const std::string good = ZipFile({{"a/data/0", "x" + local}, {"a/data/1", content}});
  const std::size_t offset_at = good.rfind("PK\x01\x02") + 42;
  const TempDir dir;
  for (const std::size_t offset : {good.find("PK\x03\x04", 4), std::size_t{0}}) {
    std::string bad = good;
    bad.replace(offset_at, 4, LittleEndian(offset, 4));
    if (offset == 0) {  // the very same range
      bad.replace(offset_at - 26, 12, good, good.find("PK\x01\x02") + 16, 12);
    }
    // The names in front of the data tell the second case apart already.
    CHECK_THAT(LoadError(dir.Write("x.pt", bad)),
               Contains(offset == 0 ? "'a/data/1': its local header at byte 0" : "overlap"));
  }
  CHECK_THAT(LoadError(dir.Write("x.pt", good)), !Contains("overlap"));
}

}  // namespace modelcache
