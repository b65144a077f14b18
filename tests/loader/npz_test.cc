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

TEST_CASE("Npz: headers are read as numpy reads them, or refused", "[unit]") {
  const auto npy = [](const std::string& header, const std::string& version = "\1") {
    return "\x93NUMPY" + version + std::string(1, '\0') + LittleEndian(header.size(), 2) + header +
           std::string(8, '\1');
  };
  const auto with = [&](const std::string& descr, const std::string& order,
                        const std::string& shape) {
    return ErrorOf(
        npy("{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + "}\n"));
  };
  for (const char* descr : {"'<f4'", "'=f4'", "'|f4'", "'f4'", "\"<f4\""}) {
    INFO(descr);
    CHECK(with(descr, "False", "(2,)") == "(loaded)");
  }
  for (const char* descr : {"'>u1'", "'<b1'", "'=i1'", "'|u1'"}) {
    INFO(descr);
    CHECK(with(descr, "True", "(8,)") == "(loaded)");
  }
  CHECK(with("'<f4'", "False", "( 2L , 1 , )") == "(loaded)");
  CHECK(ErrorOf(npy("{ 'shape':(2,) ,'fortran_order':False,\n'descr':'<f4' , }  \n")) ==
        "(loaded)");
  for (const char* descr : {"'>f4'", "'>i8'", "'|O'", "'<U4'", "'|S8'", "'<M8[ns]'", "'<f16'",
                            "'|V8'", "'float32'", "''", "'<'"}) {
    CHECK_THAT(with(descr, "False", "(1,)"), Contains("'a.npy'") && Contains("no tensor type"));
  }
  CHECK_THAT(with("[('x', '<f4'), ('y', '<i4')]", "False", "(1,)"), Contains("structured dtype"));
  CHECK_THAT(with("('<f4', (2,))", "False", "(1,)"), Contains("structured dtype"));
  CHECK_THAT(with("'<f4', 'descr': '<i4'", "False", "(2,)"), Contains("member 'descr' twice"));
  CHECK_THAT(with("'<f4'", "False", "(2,), 'shape': (1,)"), Contains("member 'shape' twice"));
  CHECK_THAT(with("'<f4'", "False", "(2,), 'x': 1"), Contains("member 'x', which is none of"));
  for (const char* order : {"1", "true", "None", "", "'False'"}) {
    CHECK_THAT(with("'<f4'", order, "(2,)"), Contains("unreadable header"));
  }
  for (const char* shape :
       {"(2)", "2", "[2]", "(,)", "(2,,)", "(-2,)", "(0x2,)", "(2.0,)", "(2,"}) {
    CHECK_THAT(with("'<f4'", "False", shape), Contains("unreadable header"));
  }
  CHECK_THAT(ErrorOf(npy("{'descr': '<f4', 'shape': (2,)}\n")), Contains("unreadable header"));
  CHECK_THAT(ErrorOf(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x")),
             Contains("unreadable header"));
  const std::string sound = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\n";
  CHECK_THAT(ErrorOf(npy(sound, "\4")), Contains("format version 4.0"));
  CHECK_THAT(ErrorOf(npy(sound, std::string(1, '\0'))), Contains("format version 0.0"));
}

TEST_CASE("Npz: a record whose bytes are not those of its CRC is refused, stored or deflated",
          "[unit]") {
  // Over a digest leaf, so that sums of several threads are put together.
  const std::string data(3'000'001, 'x');
  const std::string array = Npy("|u1", "False", "(3000001,)", data);
  for (const bool deflated : {false, true}) {
    INFO(deflated);
    const std::string good = ZipFile({{"a.npy", array, deflated}});
    const TempDir dir;
    REQUIRE(LoadError(dir.Write("x.npz", good)) == "(loaded)");
    const std::size_t directory = good.rfind("PK\x01\x02");
    const auto spoiled = [&](const std::string& sum) {
      std::string bad = good;
      return bad.replace(14, 4, sum).replace(directory + 16, 4, sum);
    };
    CHECK_THAT(LoadError(dir.Write("x.npz", spoiled(LittleEndian(0x12345678, 4)))),
               Contains("'a.npy'") && Contains("CRC-32") && Contains("12345678"));
    if (!deflated) {
      for (const std::size_t at : {std::size_t{60}, good.size() / 2, directory - 1}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 1);
        CHECK_THAT(LoadError(dir.Write("x.npz", bad)), Contains("'a.npy'"));
      }
    }
  }
}

TEST_CASE("Npz: the CRC of a record is checked where its bytes are shared, too", "[unit]") {
  const std::string array = Npy("|u1", "False", "(200000,)", std::string(200'000, 'x'));
  const TempDir dir;
  std::string twice = ZipFile({{"a.npy", array}, {"b.npy", array}});
  const auto lender = Load(dir.Write("lender.npz", ZipFile({{"a.npy", array}})));
  REQUIRE(lender.ok());
  DaemonScript script;
  script.lender = &*lender;
  REQUIRE(Load({.paths = {dir.Write("x.npz", twice)}}, script).ok());
  const std::size_t directory = twice.rfind("PK\x01\x02");
  const std::size_t local = twice.find("PK\x03\x04", 4);
  twice.replace(local + 14, 4, "sum!").replace(directory + 16, 4, "sum!");
  const std::string path = dir.Write("x.npz", twice);
  CHECK_THAT(LoadError(path), Contains("'b.npy'") && Contains("CRC-32"));
  const auto borrowed = Load({.paths = {path}}, script);
  REQUIRE_FALSE(borrowed.ok());
  CHECK_THAT(borrowed.error().message, Contains("'b.npy'") && Contains("CRC-32"));
}

TEST_CASE("Npz: an empty array is checked as well, and names must be readable", "[unit]") {
  const TempDir dir;
  std::string empty = ZipFile({{"e.npy", Npy("<i8", "False", "(0, 4)", "")}});
  const std::size_t directory = empty.rfind("PK\x01\x02");
  empty.replace(14, 4, "sum!").replace(directory + 16, 4, "sum!");
  CHECK_THAT(LoadError(dir.Write("x.npz", empty)), Contains("CRC-32"));
  CHECK_THAT(LoadError(dir.Write("x.npz", ZipFile({{"\x81.npy", Npy("|u1", "False", "()", "x")}}))),
             Contains("before UTF-8"));
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
