// Checkpoints made to break the loader: small files that ask for much memory, time or stack.
#include <chrono>
#include <string>
#include <string_view>

#include "tests/loader/loader_harness.h"
#include "tests/loader/pickle_builder.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

using std::string_literals::operator""s;

constexpr std::size_t kMebibyte = 1U << 20U;

std::string WithOneFloat(const std::string& pickle) {
  return Checkpoint(pickle, {LittleEndian(0x3F800000, 4)});
}

// Refused for its copies, with the limit, at once.
void CheckRefusedForCopies(const std::string& pickle) {
  const TempDir dir;
  const auto start = std::chrono::steady_clock::now();
  const std::string message = LoadError(dir.Write("x.pt", WithOneFloat(pickle)));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  CHECK_THAT(message, Contains("for copies of its values") && Contains("bytes of pickle") &&
                          Contains("limit "));
  CHECK(seconds.count() < 2);
}

}  // namespace

TEST_CASE("Hostile: a name of a megabyte that is looked up 20,000 times", "[unit]") {
  const std::string names =
      PickledText(std::string(kMebibyte, 'm')) + Put(0) + PickledText("n") + Put(1);
  CheckRefusedForCopies("\x80\x04(" + names + Times(20'000, "h\0h\1\x93"s) + "l.");
}

TEST_CASE("Hostile: a text of a megabyte that stands in 30,000 places", "[unit]") {
  for (const char c : {'t', '\1'}) {
    const std::string text = "(" + PickledText(std::string(kMebibyte, c)) + Put(0);
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
  CheckRefusedForCopies("\x80\x02" + PickledText(std::string(kMebibyte, 'b')) + "\x85" + Put(1) +
                        "0c_codecs\nencode\n" + Put(2) + "0(" + Times(20'000, "h\2h\1R"s) + "l.");
}

TEST_CASE("Hostile: a long key, device or class that many tensors and leaves repeat", "[unit]") {
  const std::string text = PickledText(std::string(kMebibyte, 'k')) + Put(0) + "0";
  CheckRefusedForCopies("\x80\x02" + text + "(" + Times(20'000, "}h\0Ns"s) + "l.");
  CheckRefusedForCopies("\x80\x02" + text + "ctorch\ndevice\n(h\0tR"s + Put(1) + "0(" +
                        Times(20'000, "h\1"s) + "l.");
  CheckRefusedForCopies("\x80\x04" + text + "h\0h\0\x93"s + Put(1) + "0(" + Times(20'000, "h\1"s) +
                        "l.");
}

TEST_CASE("Hostile: one attribute name of a megabyte on many dicts", "[unit]") {
  const std::string state = "}" + PickledText(std::string(kMebibyte, 'k')) + "Ns" + Put(0) + "0";
  CheckRefusedForCopies("\x80\x02" + state + "(" + Times(20'000, "}h\0b"s) + "l.");
}

TEST_CASE("Hostile: what an ordinary checkpoint copies is far from the limit", "[unit]") {
  const TempDir dir;
  const std::string text = "(" + PickledText(std::string(kMebibyte, 't')) + Put(0);
  CHECK(LoadError(dir.Write("x.pt", WithOneFloat("\x80\x02" + text + Times(10, "h\0"s) + "l."))) ==
        "(loaded)");
}

TEST_CASE("Hostile: 50,000 pairs of tensors with one name, and names that are taken", "[unit]") {
  // {i: t, "i": t, "[i]": t}: the last looks like the new name of the first.
  std::string pickle = "\x80\x02}" + PickledTensor("0") + Put(0) + "0(";
  for (int i = 0; i < 50'000; ++i) {
    const std::string digits = std::to_string(i);
    pickle += PickledInt(i) + Get(0) + PickledText(digits) + Get(0) +
              PickledText("[" + digits + "]") + Get(0);
  }
  const TempDir dir;
  const auto start = std::chrono::steady_clock::now();
  const auto model = Load(dir.Write("x.pt", WithOneFloat(pickle + "u.")));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  INFO((model.ok() ? "" : model.error().message));
  REQUIRE(model.ok());
  CHECK(model->manifest().tensors().size() == 150'000);
  CHECK(model->Has("[49999]"));
  CHECK(model->Has("['49999']"));
  CHECK(model->Has("['[49999]']"));
  CHECK_FALSE(model->Has("49999"));
  CHECK(seconds.count() < 10);
}

TEST_CASE("Hostile: a key set 40,000 times is one tensor, and costs no square of that", "[unit]") {
  const std::string pickle = "\x80\x02}" + PickledTensor("0") + Put(0) + "0" + PickledText("a") +
                             Put(1) + "0(" + Times(40'000, "h\1h\0"s) + "u.";
  const TempDir dir;
  const auto start = std::chrono::steady_clock::now();
  const auto model = Load(dir.Write("x.pt", WithOneFloat(pickle)));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  REQUIRE(model.ok());
  CHECK(model->Names() == std::vector<std::string>{"a"});
  CHECK(seconds.count() < 4);
}

TEST_CASE("Hostile: long names in conflict are refused for their copies", "[unit]") {
  // {k: [t, t, …], k + ".0": t, …} with k of 1 MiB: each conflict asks for another long name.
  const std::string text(kMebibyte, 'k');
  std::string pickle = "\x80\x02}" + PickledTensor("0") + Put(0) + "0" + PickledText(text) + "](" +
                       Times(20'000, "h\0"s) + "es";
  pickle += PickledText("list") + "}" + PickledText(text) + "](" + Times(20'000, "h\0"s) + "ess";
  CheckRefusedForCopies(pickle + ".");
}

}  // namespace modelcache
