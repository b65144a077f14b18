// numpy's .npz files, built by hand: no numpy is needed to test them.
#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

// A .npy array of format version 1, its header padded to 64 bytes as numpy does.
std::string Npy(const std::string& descr, const std::string& order, const std::string& shape,
                const std::string& data) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
  while ((header.size() + 11) % 64 != 0) {
    header += ' ';
  }
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + LittleEndian(header.size(), 2) + header + data;
}

std::string ErrorOf(const std::string& array) {
  const TempDir dir;
  return LoadError(dir.Write("x.npz", ZipFile({{"a.npy", array}})));
}

const std::string kSix = RawBytes(std::vector<float>{0, 1, 2, 3, 4, 5});

}  // namespace

TEST_CASE("Npz: arrays of both orders, scalars and empty ones", "[unit]") {
  const TempDir dir;
  const auto model =
      Load(dir.Write("x.npz", ZipFile({{"c.npy", Npy("<f4", "False", "(2, 3)", kSix)},
                                       {"f.npy", Npy("<f4", "True", "(2, 3)", kSix)},
                                       {"s.npy", Npy("|u1", "False", "()", "\7")},
                                       {"e.npy", Npy("<i8", "False", "(0, 4)", "")},
                                       {"v.npy", Npy("<f4", "False", "(6,)", kSix)}})));
  REQUIRE(model.ok());
  CHECK(model->manifest().format() == "npz");
  CHECK(model->Stride("c") == std::vector<std::int64_t>{3, 1});
  CHECK(model->Stride("f") == std::vector<std::int64_t>{1, 2});
  CHECK(model->Raw("f") == kSix);
  CHECK(model->Shape("s").empty());
  CHECK(model->Shape("e") == std::vector<std::int64_t>{0, 4});
  CHECK(model->Values<float>("v") == std::vector<float>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("Npz: what has no tensor type or no sound header is refused by name", "[unit]") {
  CHECK_THAT(ErrorOf(Npy(">f4", "False", "(6,)", kSix)), Contains("'a.npy'") && Contains(">f4"));
  CHECK_THAT(ErrorOf(Npy("|O", "False", "(1,)", "12345678")), Contains("|O"));
  CHECK_THAT(ErrorOf(Npy("<f4", "False", "(7,)", kSix)), Contains("28 bytes needed, has 24"));
  CHECK_THAT(ErrorOf(Npy("<f4", "False", "(99999999999999999999,)", kSix)), Contains("64 bits"));
  CHECK_THAT(ErrorOf(Npy("<f4", "False", "(4294967296, 4294967296)", kSix)),
             Contains("over 2^63 bytes needed"));
  CHECK_THAT(ErrorOf(Npy("<f4", "False", "(x)", kSix)), Contains("unreadable"));
  CHECK_THAT(ErrorOf("not an array at all"), Contains("no .npy array"));
  CHECK_THAT(ErrorOf(std::string("\x93NUMPY\x01\x00\xff\xff", 10) + "{}"), Contains("65535"));
}

TEST_CASE("Zip: an archive of something else is named as such", "[unit]") {
  const TempDir dir;
  CHECK_THAT(LoadError(dir.Write("x", ZipFile({{"readme.txt", "hello"}}))),
             Contains("neither a torch checkpoint") && Contains("'readme.txt'"));
}

TEST_CASE("Npz: no truncation and no flipped byte ends the loader", "[unit]") {
  const std::string good = ZipFile({{"a.npy", Npy("<f4", "False", "(2, 3)", kSix)}});
  const TempDir dir;
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(LoadError(dir.Write("x", good.substr(0, size))) != "(loaded)");
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    CHECK_FALSE(LoadError(dir.Write("x", bad)).empty());
  }
}

}  // namespace modelcache
