// The pickle machine alone: what it refuses, what it bounds, what it keeps.
#include "server/loader/pickle.h"

#include "tests/support/catch.h"

namespace modelcache {
namespace {

using std::string_literals::operator""s;

std::string ErrorOf(const std::string& pickle) {
  const auto document = ReadPickle(pickle);
  return document.ok() ? "(read)" : document.error().message;
}

}  // namespace

TEST_CASE("Pickle: names that run code are refused in every way of naming", "[unit]") {
  for (const char* name :
       {"os\nsystem\n", "posix\nsystem\n", "nt\nsystem\n", "subprocess\nPopen\n",
        "builtins\neval\n", "__builtin__\nexec\n", "builtins\ngetattr\n",
        "importlib\nimport_module\n", "runpy\nrun_path\n", "shutil\nrmtree\n", "socket\nsocket\n",
        "ctypes\nCDLL\n", "pickle\nloads\n", "marshal\nloads\n", "webbrowser\nopen\n",
        "torch\nload\n", "torch.hub\nload\n", "os.path\nexists\n", "sys\nexit\n"}) {
    INFO(name);
    CHECK_THAT(ErrorOf("\x80\x02"
                       "c" +
                       std::string(name) + "."),
               Contains("can run code"));
    CHECK_THAT(ErrorOf("\x80\x02(i" + std::string(name) + "."), Contains("can run code"));
  }
  CHECK_THAT(ErrorOf("\x80\x04\x8c\x02os\x8c\x06system\x93."), Contains("os.system"));
  // A dotted name reaches further than its module.
  CHECK_THAT(ErrorOf("\x80\x04\x8c\x05torch\x8c\x08hub.load\x93."), Contains("torch.hub.load"));
  CHECK(ErrorOf("\x80\x02"
                "cosmetics\nsystem\n.") == "(read)");
}

TEST_CASE("Pickle: unknown classes are kept as calls that were never made", "[unit]") {
  const auto document = ReadPickle(
      "\x80\x02"
      "c__main__\nNet\n)\x81}X\1\0\0\0aK\1sb."s);
  REQUIRE(document.ok());
  const PickleNode& call = document->At(document->root);
  CHECK(call.kind == PickleKind::kCall);
  CHECK(document->At(call.items[0]).text == "__main__.Net");
  CHECK(document->At(call.state).kind == PickleKind::kDict);
}

TEST_CASE("Pickle: integers of every length", "[unit]") {
  const auto value = [](const std::string& pickle) {
    const auto document = ReadPickle("\x80\x02" + pickle + ".");
    REQUIRE(document.ok());
    const PickleNode& root = document->At(document->root);
    return root.kind == PickleKind::kInt ? std::to_string(root.integer) : root.text;
  };
  CHECK(value("K\xff"s) == "255");
  CHECK(value("M\xff\xff"s) == "65535");
  CHECK(value("J\xff\xff\xff\xff"s) == "-1");
  CHECK(value("\x8a\0"s) == "0");
  CHECK(value("\x8a\1\x80"s) == "-128");
  CHECK(value("\x8a\x08\0\0\0\0\0\0\0\x80"s) == "-9223372036854775808");
  CHECK(value("\x8a\x09\0\0\0\0\0\0\0\x80\0"s) == "9223372036854775808");
  CHECK(value("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\xfe"s) == "-18446744073709551617");
}

TEST_CASE("Pickle: streams that make no sense are errors with a position", "[unit]") {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"", "byte 0"},
      {"\x80\x02", "byte 2"},
      {"\x80\x02.", "empty stack"},
      {"\x80\x02t.", "there is none"},
      {"\x80\x02}(K\1u.", "odd number"},
      {"\x80\x02(K\1d.", "odd number"},
      {"\x80\x02K\1K\1a.", "no list"},
      {"\x80\x02h\5.", "memo 5"},
      {"\x80\x02K\1K\1R.", "no tuple"},
      {"\x80\x02X\xff\xff\xff\xffhi.", "needs 4294967295 more bytes"},
      {"\x80\x02\x8b\xff\xff\xff\x7f.", "more bytes"},
      {"\x80\x01N.", "protocol 1"},
      {"I1\n.", "protocols 2 to 5"},
      {"\x80\x05\x97.", "protocols 2 to 5"},
      {"\x80\x02\x82\1.", "protocols 2 to 5"},
  };
  for (const auto& [pickle, expected] : rows) {
    CHECK_THAT(ErrorOf(pickle), Contains(expected));
  }
}

TEST_CASE("Pickle: a stack above a mark cannot be taken by what is below it", "[unit]") {
  CHECK_THAT(ErrorOf("\x80\x02K\1(\x85."), Contains("takes 1 values"));
  CHECK_THAT(ErrorOf("\x80\x02](K\1a."), Contains("appends to nothing"));
}

TEST_CASE("Pickle: 100,000 levels of nesting cost no stack", "[unit]") {
  const auto document =
      ReadPickle("\x80\x02" + std::string(100000, ']') + std::string(99999, 'a') + ".");
  CHECK(document.ok());
}

TEST_CASE("Pickle: more values than the limit are refused", "[unit]") {
  CHECK_THAT(ErrorOf("\x80\x02" + std::string(5U << 20U, ']')), Contains("more than 4194304"));
}

}  // namespace modelcache
