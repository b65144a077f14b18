// Checkpoints made to break the loader: small files that ask for much memory, time or stack.
#include <chrono>
#include <string>
#include <string_view>

#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

using std::string_literals::operator""s;

constexpr std::size_t kMebibyte = 1U << 20U;

std::string Text(const std::string& text) { return "X" + LittleEndian(text.size(), 4) + text; }

// A memo of 4 bytes, so that it fits any number.
std::string Put(std::uint64_t key) { return "r" + LittleEndian(key, 4); }

std::string Times(std::size_t count, const std::string& part) {
  std::string all;
  all.reserve(count * part.size());
  for (std::size_t i = 0; i < count; ++i) {
    all += part;
  }
  return all;
}

std::string Checkpoint(const std::string& pickle) {
  return ZipFile({{"a/data.pkl", pickle}, {"a/data/0", LittleEndian(0x3F800000, 4)}});
}

// One float32 of storage 0.
const std::string kTensor = "ctorch._utils\n_rebuild_tensor_v2\n((" + Text("storage") +
                            "ctorch\nFloatStorage\n" + Text("0") + Text("cpu") +
                            "K\1tQK\0K\1\x85K\1\x85\x89"s + "ccollections\nOrderedDict\n)RtR";

// Refused for its copies, with the limit, at once.
void CheckRefusedForCopies(const std::string& pickle) {
  const TempDir dir;
  const auto start = std::chrono::steady_clock::now();
  const std::string message = LoadError(dir.Write("x.pt", Checkpoint(pickle)));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  CHECK_THAT(message, Contains("for copies of its values") && Contains("bytes of pickle") &&
                          Contains("limit "));
  CHECK(seconds.count() < 2);
}

}  // namespace

TEST_CASE("Hostile: a name of a megabyte that is looked up 20,000 times", "[unit]") {
  const std::string names = Text(std::string(kMebibyte, 'm')) + Put(0) + Text("n") + Put(1);
  CheckRefusedForCopies("\x80\x04(" + names + Times(20'000, "h\0h\1\x93"s) + "l.");
}

TEST_CASE("Hostile: a text of a megabyte that stands in 30,000 places", "[unit]") {
  for (const char c : {'t', '\1'}) {
    const std::string text = "(" + Text(std::string(kMebibyte, c)) + Put(0);
    CheckRefusedForCopies("\x80\x02" + text + Times(30'000, "h\0"s) + "l.");
  }
}

TEST_CASE("Hostile: containers and bytes that are copied from one again and again", "[unit]") {
  const std::string items = "(" + Times(kMebibyte, "N");
  const std::string list = items + "l" + Put(0) + "\x85" + Put(1) + "0";
  CheckRefusedForCopies("\x80\x02" + list + "cbuiltins\nset\n" + Put(2) + "0(" +
                        Times(20'000, "h\2h\1R"s) + "l.");
  const std::string dict = items + "d" + Put(0) + "\x85" + Put(1) + "0";
  CheckRefusedForCopies("\x80\x02" + dict + "ccollections\nOrderedDict\n" + Put(2) + "0(" +
                        Times(20'000, "h\2h\1R"s) + "l.");
  // A dict is no argument for set(): the call is kept, but was tried.
  CheckRefusedForCopies("\x80\x02" + dict + "cbuiltins\nset\n" + Put(2) + "0(" +
                        Times(20'000, "h\2h\1R"s) + "l.");
  CheckRefusedForCopies("\x80\x02" + Text(std::string(kMebibyte, 'b')) + "\x85" + Put(1) +
                        "0c_codecs\nencode\n" + Put(2) + "0(" + Times(20'000, "h\2h\1R"s) + "l.");
}

TEST_CASE("Hostile: a long key, device or class that many tensors and leaves repeat", "[unit]") {
  const std::string text = Text(std::string(kMebibyte, 'k')) + Put(0) + "0";
  CheckRefusedForCopies("\x80\x02" + text + "(" + Times(20'000, "}h\0Ns"s) + "l.");
  CheckRefusedForCopies("\x80\x02" + text + "ctorch\ndevice\n(h\0tR"s + Put(1) + "0(" +
                        Times(20'000, "h\1"s) + "l.");
  CheckRefusedForCopies("\x80\x04" + text + "h\0h\0\x93"s + Put(1) + "0(" + Times(20'000, "h\1"s) +
                        "l.");
}

TEST_CASE("Hostile: one attribute name of a megabyte on many dicts", "[unit]") {
  const std::string state = "}" + Text(std::string(kMebibyte, 'k')) + "Ns" + Put(0) + "0";
  CheckRefusedForCopies("\x80\x02" + state + "(" + Times(20'000, "}h\0b"s) + "l.");
}

TEST_CASE("Hostile: what an ordinary checkpoint copies is far from the limit", "[unit]") {
  const TempDir dir;
  const std::string text = "(" + Text(std::string(kMebibyte, 't')) + Put(0);
  CHECK(LoadError(dir.Write("x.pt", Checkpoint("\x80\x02" + text + Times(10, "h\0"s) + "l."))) ==
        "(loaded)");
}

TEST_CASE("Hostile: 149,999 tensors whose names are taken by numbered ones", "[unit]") {
  std::string pickle = "\x80\x02}" + kTensor + Put(0) + "0(";
  for (int i = 2; i < 150'000; ++i) {
    pickle += Text("a#" + std::to_string(i)) + "h\0"s;
  }
  pickle += Text("a") + "h\0"s + Text("a") + "h\0u."s;
  const TempDir dir;
  const auto model = Load(dir.Write("x.pt", Checkpoint(pickle)));
  INFO((model.ok() ? "" : model.error().message));
  REQUIRE(model.ok());
  CHECK(model->Has("a"));
  CHECK(model->Has("a#149999"));
  CHECK(model->Has("a#150000"));
}

TEST_CASE("Hostile: 40,000 tensors of one name do not cost the square of that", "[unit]") {
  const std::string pickle = "\x80\x02}" + kTensor + Put(0) + "0" + Text("a") + Put(1) + "0(" +
                             Times(40'000, "h\1h\0"s) + "u.";
  const TempDir dir;
  const auto start = std::chrono::steady_clock::now();
  const auto model = Load(dir.Write("x.pt", Checkpoint(pickle)));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  REQUIRE(model.ok());
  CHECK(model->Has("a#40000"));
  CHECK(seconds.count() < 4);
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
    CHECK_THAT(LoadError(dir.Write("x.pt", bad)),
               Contains("'a/data/0' and 'a/data/1' overlap") ||
                   Contains("'a/data/1' and 'a/data/0' overlap"));
  }
  CHECK_THAT(LoadError(dir.Write("x.pt", good)), !Contains("overlap"));
}

}  // namespace modelcache
