// Names of nested tensors: one name for one place, whatever the keys are.
#include <nlohmann/json.hpp>

#include "tests/loader/loader_harness.h"
#include "tests/loader/pickle_builder.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

using Names = std::vector<std::string>;

// Storage i holds the float i + 1.
LoadedModel LoadPickle(const TempDir& dir, const std::string& value) {
  std::vector<std::string> storages;
  for (int i = 0; i < 6; ++i) {
    storages.push_back(RawBytes(std::vector<float>{static_cast<float>(i + 1)}));
  }
  auto model = Load(dir.Write("x.pt", Checkpoint("\x80\x02" + value + ".", storages)));
  INFO((model.ok() ? "" : model.error().message));
  REQUIRE(model.ok());
  return std::move(*model);
}

std::string Tensor(int number) { return PickledTensor(std::to_string(number - 1)); }

// The dict of these pairs.
std::string Dict(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::string pickle = "}(";
  for (const auto& [key, value] : pairs) {
    pickle += key + value;
  }
  return pickle + "u";
}

float ValueOf(const LoadedModel& model, const std::string& name) {
  REQUIRE(model.Has(name));
  return model.Values<float>(name)[0];
}

}  // namespace

TEST_CASE("Names: the joined keys, as long as they stand for one tensor", "[unit]") {
  const TempDir dir;
  const std::string inner =
      Dict({{PickledText("w.0"), Tensor(1)}, {PickledInt(7), Tensor(2)}, {"N", Tensor(3)}});
  const LoadedModel model = LoadPickle(
      dir, Dict({{PickledText("m"), inner}, {PickledText("l"), "](" + Tensor(4) + "e"}}));
  CHECK(model.Names() == Names{"m.w.0", "m.7", "m.key2", "l.0"});
}

TEST_CASE("Names: tensors whose joined keys are one text get subscripts, all of them", "[unit]") {
  const TempDir dir;
  SECTION("a nested dict and a key with a dot") {
    const LoadedModel model =
        LoadPickle(dir, Dict({{PickledText("a"), Dict({{PickledText("b"), Tensor(1)}})},
                              {PickledText("a.b"), Tensor(2)},
                              {PickledText("c"), Tensor(3)}}));
    CHECK(model.Names() == Names{"['a']['b']", "['a.b']", "c"});
    CHECK(ValueOf(model, "['a']['b']") == 1);
    CHECK(ValueOf(model, "['a.b']") == 2);
    CHECK_FALSE(model.Has("a.b"));
  }
  SECTION("a number and its digits") {
    const LoadedModel model =
        LoadPickle(dir, Dict({{PickledInt(1), Tensor(1)}, {PickledText("1"), Tensor(2)}}));
    CHECK(model.Names() == Names{"[1]", "['1']"});
    CHECK(ValueOf(model, "[1]") == 1);
  }
  SECTION("a list and a key with a dot") {
    const LoadedModel model = LoadPickle(
        dir, Dict({{PickledText("a"), "](" + Tensor(1) + "e"}, {PickledText("a.0"), Tensor(2)}}));
    CHECK(model.Names() == Names{"['a'][0]", "['a.0']"});
  }
  SECTION("empty keys, which join to nothing") {
    const LoadedModel model =
        LoadPickle(dir, Dict({{PickledText(""), Dict({{PickledText("a"), Tensor(1)}})},
                              {PickledText("a"), Tensor(2)}}));
    CHECK(model.Names() == Names{"['']['a']", "['a']"});
  }
  SECTION("a key that has no text, and a text like its name") {
    const LoadedModel model =
        LoadPickle(dir, Dict({{"K\1K\2\x86", Tensor(1)}, {PickledText("key0"), Tensor(2)}}));
    CHECK(model.Names() == Names{"[key 0]", "['key0']"});
  }
  SECTION("an attribute and a key") {
    const std::string state = Dict({{PickledText("a"), Tensor(1)}});
    const LoadedModel model = LoadPickle(
        dir, "ccollections\nOrderedDict\n)R(" + PickledText("a") + Tensor(2) + "u" + state + "b");
    CHECK(model.Names() == Names{"['a']", ".attribute['a']"});
    CHECK(ValueOf(model, ".attribute['a']") == 1);
  }
  SECTION("a tensor that is a key") {
    const LoadedModel model =
        LoadPickle(dir, Dict({{Tensor(1), "N"}, {PickledText("key"), Tensor(2)}}));
    CHECK(model.Names() == Names{"[key 0 itself]", "['key']"});
  }
}

TEST_CASE("Names: a key that looks like the subscripts of another tensor is kept apart", "[unit]") {
  const TempDir dir;
  const LoadedModel model =
      LoadPickle(dir, Dict({{PickledText("a"), Dict({{PickledText("b"), Tensor(1)}})},
                            {PickledText("['a']['b']"), Tensor(2)},
                            {PickledText("a.b"), Tensor(3)},
                            {PickledText("it's\n\\"), Tensor(4)}}));
  CHECK(ValueOf(model, "['a']['b']") == 1);
  CHECK(ValueOf(model, R"(['[\'a\'][\'b\']'])") == 2);
  CHECK(ValueOf(model, "['a.b']") == 3);
  CHECK(ValueOf(model, "it's\n\\") == 4);
}

TEST_CASE("Names: a key that is set again keeps its place and has the last value", "[unit]") {
  const TempDir dir;
  const auto check = [&](const std::string& first, const std::string& again) {
    const std::string dict =
        Dict({{first, Tensor(1)}, {PickledText("z"), Tensor(2)}}) + again + Tensor(3) + "s";
    const LoadedModel model = LoadPickle(dir, dict);
    CHECK(model.manifest().tensors().size() == 2);
    CHECK(model.Values<float>(model.Names()[0])[0] == 3);
    const auto structure =
        nlohmann::json::parse(model.manifest().metadata_json())["structure"]["d"];
    CHECK(structure.size() == 2);
    CHECK(structure[0][1]["t"] == 0);
  };
  check(PickledText("a"), PickledText("a"));
  check(PickledInt(1), PickledInt(1));
  check(PickledInt(1), "\x88");                                                    // True
  check("G" + std::string("\x40\x00\x00\x00\x00\x00\x00\x00", 8), PickledInt(2));  // 2.0
  check("N", "N");
  check("\x8a\x09" + LittleEndian(5, 8) + std::string(1, '\0'), PickledInt(5));  // of 9 bytes
}

TEST_CASE("Names: keys that only look alike stay apart", "[unit]") {
  const TempDir dir;
  const LoadedModel model =
      LoadPickle(dir, Dict({{PickledInt(1), Tensor(1)},
                            {PickledText("1"), Tensor(2)},
                            {"C\x01" + std::string("1"), Tensor(3)},                    // bytes
                            {"G" + std::string("\x3f\xf8\0\0\0\0\0\0", 8), Tensor(4)},  // 1.5
                            {"N", Tensor(5)},
                            {"\x89", Tensor(6)}}));
  CHECK(model.Names() == Names{"[1]", "['1']", "key2", "key3", "key4", "key5"});
}

TEST_CASE("Storages: one key under two dtypes or sizes is refused, as torch.save does", "[unit]") {
  const TempDir dir;
  const auto error = [&](const std::string& first, const std::string& second,
                         const std::string& bytes) {
    const std::string pickle =
        "\x80\x02" + Dict({{PickledText("a"), first}, {PickledText("b"), second}}) + ".";
    return LoadError(dir.Write("x.pt", Checkpoint(pickle, {bytes})));
  };
  const std::string four(4, '\1');
  CHECK_THAT(error(PickledTensor("0"), PickledTensor("0", "IntStorage"), four),
             Contains("'b'") && Contains("storage '0' is used as 4 bytes of float32 and as 4 bytes "
                                         "of int32"));
  CHECK_THAT(
      error(PickledTensor("0", "FloatStorage", 1), PickledTensor("0", "FloatStorage", 2), four),
      Contains("4 bytes of float32 and as 8 bytes of float32"));
  CHECK(error(PickledTensor("0", "ByteStorage", 4), PickledTensor("0", "UntypedStorage", 4),
              four) == "(loaded)");
  // Nothing can be misread in an empty one, and torch.save writes it.
  CHECK(error(PickledTensor("0", "FloatStorage", 0), PickledTensor("0", "IntStorage", 0), "") ==
        "(loaded)");
}

TEST_CASE("Storages: a record longer or shorter than the pickle says is refused", "[unit]") {
  const TempDir dir;
  const auto error = [&](std::size_t bytes) {
    return LoadError(dir.Write(
        "x.pt", Checkpoint("\x80\x02" + PickledTensor("0") + ".", {std::string(bytes, '\1')})));
  };
  CHECK_THAT(error(7), Contains("record '0': needs 4 bytes, has 7"));
  CHECK_THAT(error(3), Contains("record '0': needs 4 bytes, has 3"));
  CHECK(error(4) == "(loaded)");
}

}  // namespace modelcache
