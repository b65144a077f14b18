// Area A of the field cases: safetensors files, sound and not.
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

const std::string kGoodHeader = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

std::string GoodFile() {
  return SafetensorsFile(kGoodHeader, RawBytes(std::vector<float>{1.0F, 2.0F}));
}

// Writes a file of the given bytes and gives the error of loading it.
std::string ErrorOf(const std::string& bytes) {
  const TempDir dir;
  return LoadError(dir.Write("x.safetensors", bytes));
}

std::string ErrorOfHeader(const std::string& header, const std::string& data = "\1\2\3\4") {
  return ErrorOf(SafetensorsFile(header, data));
}

std::string OneTensor(const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

void CheckAlive() {
  const TempDir dir;
  const auto model = Load(dir.Write("good.safetensors", GoodFile()));
  REQUIRE(model.ok());
  CHECK(model->Values<float>("w") == std::vector<float>{1.0F, 2.0F});
}

}  // namespace

TEST_CASE("Safetensors: a good file gives its tensor", "[unit]") {
  CHECK(GoodFile().size() == 72);
  CheckAlive();
}

TEST_CASE("A1: a Git LFS pointer is named as one", "[unit]") {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') +
      "\nsize 12345\n";
  CHECK(pointer.size() == 130);
  const std::string message = ErrorOf(pointer);
  CHECK_THAT(message, Contains("x.safetensors") && Contains("Git LFS pointer") && Contains("130") &&
                          Contains("2336927755350992246"));
  CheckAlive();
}

TEST_CASE("A2: a file cut short says what it needs and has, and is not remembered", "[unit]") {
  const TempDir dir;
  const std::string path = dir.Write("x.safetensors", GoodFile().substr(0, 69));
  CHECK_THAT(LoadError(path), Contains("needs 72, has 69") && Contains("'w'"));
  (void)dir.Write("x.safetensors", GoodFile());
  CHECK(LoadError(path) == "(loaded)");
}

TEST_CASE("A3: a shape that promises more bytes than the range holds", "[unit]") {
  const std::string message = ErrorOf(SafetensorsFile(
      R"({"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}})", std::string(4, '\0')));
  CHECK_THAT(message, Contains("'t'") && Contains("4000000 bytes needed, range has 4"));
}

TEST_CASE("A4: a shape product that wraps 64 bits", "[unit]") {
  CHECK_THAT(ErrorOfHeader(OneTensor("F32", "[4294967296,4294967296]", "[0,0]"), ""),
             Contains("overflow"));
  CHECK_THAT(ErrorOfHeader(OneTensor("F32", "[4611686018427387905]", "[0,4]")),
             Contains("overflow"));
  CHECK_THAT(ErrorOfHeader(OneTensor("F32", "[0,4611686018427387904,8]", "[0,0]"), ""),
             Contains("overflow"));
}

TEST_CASE("A5: valid JSON of the wrong form", "[unit]") {
  struct Row {
    std::string header;
    std::string expected;
  };
  const std::vector<Row> rows = {
      {"[]", "must start with '{'"},
      {"\"x\"", "must start with '{'"},
      {R"({"a":3})", "'a' must be an object, found 3"},
      {R"({"a":{"dtype":"U8","shape":[4]}})", "no member 'data_offsets'"},
      {OneTensor("U8", "[4]", "[4,0]"), "end before they start"},
      {OneTensor("U8", "[4]", "[-1,3]"), "found -1"},
      {OneTensor("U8", "[4]", "[0,4.5]"), "found 4.5"},
      {OneTensor("U8", "[4]", "[0,4,4]"), "must have 2 numbers, found 3"},
      {OneTensor("U8", "[4]", R"(["0","4"])"), "found text '0'"},
      {OneTensor("U8", "[-4]", "[0,4]"), "found -4"},
      {OneTensor("U8", "[4.0]", "[0,4]"), "found 4.0"},
      {std::string(100000, '['), "must start with '{'"},
      {"{\"a\":" + std::string(100000, '['), "found a list"},
      {R"({"a":{"x":)" + std::string(100000, '['), "nested deeper"},
  };
  for (const Row& row : rows) {
    CHECK_THAT(ErrorOfHeader(row.header), Contains(row.expected));
    CheckAlive();
  }
  CHECK_THAT(ErrorOf(std::string(8, '\0')), Contains("header of 0 bytes"));
  CHECK_THAT(ErrorOf(std::string(7, '\0')), Contains("7 bytes"));
  CHECK_THAT(ErrorOf(""), Contains("empty (0 bytes)"));
}

TEST_CASE("A6: a number inside __metadata__", "[unit]") {
  const std::string tensor = R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  CHECK_THAT(ErrorOfHeader(R"({"__metadata__":{"step":0},)" + tensor, "\7"),
             Contains("__metadata__") && Contains("'step'") && Contains("string"));
  const TempDir dir;
  const auto model =
      Load(dir.Write("x", SafetensorsFile(R"({"__metadata__":{"step":"0"},)" + tensor, "\7")));
  REQUIRE(model.ok());
  CHECK(model->Values<std::uint8_t>("w") == std::vector<std::uint8_t>{7});
  CHECK_THAT(std::string(model->manifest().metadata_json()),
             Contains(R"("metadata":{"step":"0"})"));
}

TEST_CASE("A7: metadata but no tensor", "[unit]") {
  const TempDir dir;
  const auto model =
      Load(dir.Write("x", SafetensorsFile(R"({"__metadata__":{"key":"value"}})", "")));
  REQUIRE(model.ok());
  CHECK(model->Names().empty());
  CHECK_THAT(std::string(model->manifest().metadata_json()), Contains(R"({"key":"value"})"));
  CHECK_THAT(ErrorOfHeader(R"({},"__metadata__":{"key":"value"}})", ""),
             Contains("error at byte 2"));
  const auto empty = Load(dir.Write("y", SafetensorsFile("{}", "")));
  REQUIRE(empty.ok());
  CHECK(empty->Names().empty());
  CHECK(empty->manifest().PayloadBytes() == 0);
}

TEST_CASE("A8: a tensor called __metadata__", "[unit]") {
  CHECK_THAT(ErrorOfHeader(R"({"__metadata__":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})",
                           "12345678"),
             Contains("__metadata__") && Contains("string"));
}

TEST_CASE("A9: empty tensors of several shapes", "[unit]") {
  const TempDir dir;
  const auto model = Load(dir.Write(
      "x",
      SafetensorsFile(
          R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},"c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
          RawBytes(std::vector<float>{1.5F}))));
  REQUIRE(model.ok());
  CHECK(model->Shape("a") == std::vector<std::int64_t>{0});
  CHECK(model->Shape("b") == std::vector<std::int64_t>{2, 0});
  CHECK(model->Values<float>("c") == std::vector<float>{1.5F});
  CHECK(model->manifest().PayloadBytes() == 4);
}

TEST_CASE("A10: scalar tensors stay scalar", "[unit]") {
  const TempDir dir;
  const auto model = Load(
      dir.Write("x", SafetensorsFile(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
                                     RawBytes(std::vector<float>{2.5F}))));
  REQUIRE(model.ok());
  CHECK(model->Shape("s").empty());
  CHECK(model->Values<float>("s") == std::vector<float>{2.5F});
}

TEST_CASE("A11: packed 4-bit and exponent-only dtypes", "[unit]") {
  const TempDir dir;
  const std::string eight("\0\1\2\3\4\5\6\7", 8);
  const auto packed =
      Load(dir.Write("q", SafetensorsFile(OneTensor("F4", "[2,8]", "[0,8]"), eight)));
  REQUIRE(packed.ok());
  CHECK(packed->Shape("a") == std::vector<std::int64_t>{2, 4});
  CHECK(packed->Raw("a") == eight);
  CHECK(packed->Tensor("a").dtype == static_cast<std::uint16_t>(Dtype::kFloat4E2m1fnX2));
  CHECK_THAT(ErrorOfHeader(OneTensor("F4", "[3]", "[0,2]"), "ab"),
             Contains("not a whole number of bytes"));
  CHECK_THAT(ErrorOfHeader(OneTensor("F4", "[2,3]", "[0,3]"), "abc"), Contains("odd"));
  const auto scale =
      Load(dir.Write("s", SafetensorsFile(OneTensor("F8_E8M0", "[3]", "[0,3]"), "\x7e\x7f\x80")));
  REQUIRE(scale.ok());
  CHECK(scale->Raw("a") == "\x7e\x7f\x80");
  CHECK(scale->Tensor("a").dtype == static_cast<std::uint16_t>(Dtype::kFloat8E8m0fnu));
}

TEST_CASE("Safetensors: every dtype of the format keeps its bytes", "[unit]") {
  struct Row {
    const char* name;
    Dtype dtype;
    int bits;
  };
  const std::vector<Row> rows = {
      {"BOOL", Dtype::kBool, 8},
      {"U8", Dtype::kUint8, 8},
      {"I8", Dtype::kInt8, 8},
      {"I16", Dtype::kInt16, 16},
      {"I32", Dtype::kInt32, 32},
      {"I64", Dtype::kInt64, 64},
      {"U16", Dtype::kUint16, 16},
      {"U32", Dtype::kUint32, 32},
      {"U64", Dtype::kUint64, 64},
      {"F16", Dtype::kFloat16, 16},
      {"BF16", Dtype::kBfloat16, 16},
      {"F32", Dtype::kFloat32, 32},
      {"F64", Dtype::kFloat64, 64},
      {"C64", Dtype::kComplex64, 64},
      {"F8_E4M3", Dtype::kFloat8E4m3fn, 8},
      {"F8_E5M2", Dtype::kFloat8E5m2, 8},
      {"F8_E4M3FNUZ", Dtype::kFloat8E4m3fnuz, 8},
      {"F8_E5M2FNUZ", Dtype::kFloat8E5m2fnuz, 8},
      {"F6_E2M3", Dtype::kFloat6E2m3, 6},
      {"F6_E3M2", Dtype::kFloat6E3m2, 6},
  };
  const TempDir dir;
  for (const Row& row : rows) {
    const auto size = static_cast<std::size_t>(row.bits) * 4 / 8;
    std::string data;
    for (std::size_t i = 0; i < size; ++i) {
      data += static_cast<char>(i + 1);
    }
    const auto model = Load(dir.Write(
        "x",
        SafetensorsFile(OneTensor(row.name, "[4]", "[0," + std::to_string(size) + "]"), data)));
    REQUIRE(model.ok());
    CHECK(model->Raw("a") == data);
    CHECK(model->Tensor("a").dtype == static_cast<std::uint16_t>(row.dtype));
  }
}

TEST_CASE("A12: dtype names nobody knows", "[unit]") {
  for (const char* dtype : {"F128", "f32", "F8_E4M3FN"}) {
    CHECK_THAT(ErrorOfHeader(OneTensor(dtype, "[1]", "[0,16]"), std::string(16, 'x')),
               Contains("'a'") && Contains("unknown dtype '" + std::string(dtype) + "'"));
  }
}

TEST_CASE("A13: header order differs from data order", "[unit]") {
  const TempDir dir;
  const auto model = Load(dir.Write(
      "x",
      SafetensorsFile(
          R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
          "\1\2\3")));
  REQUIRE(model.ok());
  CHECK(model->Raw("a") == "\1");
  CHECK(model->Raw("b") == "\2\3");
}

TEST_CASE("A13: large tensors in reverse order keep their bytes with several threads", "[unit]") {
  // 3 tensors of 100 MiB whose words are their own positions in the file's data.
  constexpr std::uint64_t kSize = 100U << 20U;
  std::string header = "{";
  for (int i = 0; i < 3; ++i) {
    header += (i > 0 ? ",\"" : "\"") + std::string(1, static_cast<char>('c' - i)) +
              R"(":{"dtype":"U8","shape":[104857600],"data_offsets":[)" +
              std::to_string(kSize * static_cast<unsigned>(i)) + "," +
              std::to_string(kSize * static_cast<unsigned>(i + 1)) + "]}";
  }
  const TempDir dir;
  const std::string path = dir / "x";
  {
    std::ofstream file(path, std::ios::binary);
    file << SafetensorsFile(header + "}", "");
    std::vector<std::uint64_t> block(1U << 17U);
    for (std::uint64_t at = 0; at < 3 * kSize / 8; at += block.size()) {
      for (std::size_t i = 0; i < block.size(); ++i) {
        block[i] = at + i;
      }
      file.write(reinterpret_cast<const char*>(block.data()),
                 static_cast<std::streamsize>(block.size() * 8));
    }
  }
  const auto model = Load(path);
  REQUIRE(model.ok());
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto words = model->Values<std::uint64_t>(std::string(1, static_cast<char>('c' - i)));
    REQUIRE(words.size() == kSize / 8);
    std::size_t wrong = 0;
    for (std::size_t k = 0; k < words.size(); ++k) {
      wrong += words[k] != i * kSize / 8 + k ? 1U : 0U;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("Safetensors: holes, overlaps, repeated names and trailing bytes are refused", "[unit]") {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}";
  };
  CHECK_THAT(ErrorOfHeader(two("[0,2]", "[1,3]"), "abc"), Contains("overlap") && Contains("'b'"));
  CHECK_THAT(ErrorOfHeader(two("[0,2]", "[3,5]"), "abcde"), Contains("hole") && Contains("'b'"));
  CHECK_THAT(ErrorOfHeader(two("[0,2]", "[2,4]"), "abcde"),
             Contains("end at byte") && Contains("file has"));
  CHECK_THAT(ErrorOfHeader(OneTensor("U8", "[1]", "[1,2]"), "ab"), Contains("hole"));
  CHECK_THAT(
      ErrorOfHeader(
          R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          ""),
      Contains("'a' occurs twice"));
}

TEST_CASE("Safetensors: a header longer than the file is refused with both numbers", "[unit]") {
  CHECK_THAT(ErrorOf(LittleEndian(1000, 8) + "{}"), Contains("1000") && Contains("10 bytes"));
  CHECK_THAT(ErrorOf(LittleEndian(UINT64_MAX >> 8U, 8) + "{}      "), Contains("16 bytes"));
}

TEST_CASE("Safetensors: every truncation and every flipped byte gives an error or the model",
          "[unit]") {
  const std::string good = SafetensorsFile(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}})",
      "123456789");
  const TempDir dir;
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(LoadError(dir.Write("x", good.substr(0, size))) != "(loaded)");
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const int bit : {0, 3, 7}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      CHECK_FALSE(LoadError(dir.Write("x", bad)).empty());
    }
  }
}

TEST_CASE("Safetensors: the header is padded with spaces, not with zero bytes", "[unit]") {
  const std::string data = RawBytes(std::vector<float>{1.0F, 2.0F});
  const auto padded = [&](const std::string& padding) {
    return SafetensorsFile(kGoodHeader + padding, data, false);
  };
  for (const char* white : {" ", "\n", "\r\n", "\t"}) {
    CHECK(ErrorOf(padded(white)) == "(loaded)");
  }
  CHECK_THAT(ErrorOf(padded(std::string(1, '\0'))), Contains("not JSON") && Contains("zero byte"));
  CHECK_THAT(ErrorOf(padded(std::string("\0xyz", 4))), Contains("zero byte"));
  CHECK_THAT(ErrorOf(SafetensorsFile(std::string(1, '\0') + kGoodHeader, data, false)),
             !Contains("(loaded)"));
}

TEST_CASE("A14: a tied weight lies in the file once, and no other name is invented", "[unit]") {
  const TempDir dir;
  const std::string header =
      R"({"transformer.wte.weight":{"dtype":"F32","shape":[16,8],"data_offsets":[0,512]}})";
  const auto model =
      Load(dir.Write("model.safetensors", SafetensorsFile(header, std::string(512, '\1'))));
  REQUIRE(model.ok());
  CHECK(model->Names() == std::vector<std::string>{"transformer.wte.weight"});
  CHECK_FALSE(model->Has("lm_head.weight"));
  CHECK(model->manifest().PayloadBytes() == 512);
}

TEST_CASE("Format: one that was asked for but is not there is a clear error", "[unit]") {
  const TempDir dir;
  LoadRequest request;
  request.paths = {dir.Write("model.pt", GoodFile())};
  CHECK(Load(request).ok());  // the name decides nothing
  request.format = "torch";
  const auto model = Load(request);
  REQUIRE_FALSE(model.ok());
  CHECK_THAT(model.error().message,
             Contains("format safetensors") && Contains("torch was asked for"));
}

TEST_CASE("Format: a device is refused where the CPU is the only one", "[unit]") {
  const TempDir dir;
  LoadRequest request;
  request.paths = {dir.Write("x", GoodFile())};
  request.device = "cuda:0";
  const auto model = Load(request);
  REQUIRE_FALSE(model.ok());
  CHECK(model.error().code == ErrorCode::kUnsupported);
  CHECK_THAT(model.error().message, Contains("cuda:0"));
}

}  // namespace modelcache
