// Paths to open files.
#include "client/model_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/temp_dir.h"

using namespace modelcache;

namespace {

std::string Index(const std::vector<std::pair<std::string, std::string>>& map) {
  nlohmann::json json = {{"weight_map", nlohmann::json::object()}};
  for (const auto& [tensor, shard] : map) {
    json["weight_map"][tensor] = shard;
  }
  return json.dump();
}

std::vector<std::string> Names(const Result<ModelFiles>& files) {
  REQUIRE(files.ok());
  REQUIRE(files->files.size() == files->descriptors.size());
  std::vector<std::string> names;
  for (const FileRef& file : files->files) {
    names.push_back(file.name);
  }
  return names;
}

Error ErrorOf(const std::vector<std::string>& paths) {
  Result<ModelFiles> files = OpenModelFiles(paths);
  REQUIRE_FALSE(files.ok());
  return files.error();
}

}  // namespace

TEST_CASE("ModelFiles: a single file", "[unit]") {
  const TempDir dir;
  const std::string path = dir.Write("m.safetensors", "x");
  const Result<ModelFiles> files = OpenModelFiles({path});
  CHECK(Names(files) == std::vector<std::string>{"m.safetensors"});
  CHECK(files->files[0].path == path);
}

TEST_CASE("ModelFiles: a folder with an index gives the index, then its shards", "[unit]") {
  const TempDir dir;
  (void)dir.Write("s-2.safetensors", "2");
  (void)dir.Write("s-1.safetensors", "1");
  (void)dir.Write("other.safetensors", "0");
  (void)dir.Write(
      "model.safetensors.index.json",
      Index({{"b", "s-2.safetensors"}, {"a", "s-1.safetensors"}, {"c", "s-1.safetensors"}}));
  const std::vector<std::string> expected = {"model.safetensors.index.json", "s-1.safetensors",
                                             "s-2.safetensors"};
  CHECK(Names(OpenModelFiles({dir.path()})) == expected);
  CHECK(Names(OpenModelFiles({dir / "model.safetensors.index.json"})) == expected);
}

TEST_CASE("ModelFiles: a changed index is read again", "[unit]") {
  const TempDir dir;
  (void)dir.Write("a.safetensors", "");
  (void)dir.Write("b.safetensors", "");
  const std::string index = dir.Write("x.index.json", Index({{"t", "a.safetensors"}}));
  CHECK(Names(OpenModelFiles({index})).back() == "a.safetensors");
  (void)dir.Write("x.index.json", Index({{"t", "a.safetensors"}, {"longer", "b.safetensors"}}));
  CHECK(Names(OpenModelFiles({index})).back() == "b.safetensors");
}

TEST_CASE("ModelFiles: a folder without index and with one weights file", "[unit]") {
  const TempDir dir;
  CHECK(ErrorOf({dir.path()}).code == ErrorCode::kNotFound);
  (void)dir.Write("weights.safetensors", "");
  (void)dir.Write("config.json", "{}");
  CHECK(Names(OpenModelFiles({dir.path()})) == std::vector<std::string>{"weights.safetensors"});
  (void)dir.Write("weights2.safetensors", "");
  const Error error = ErrorOf({dir.path()});
  CHECK(error.code == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.message, Contains("2 files"));
  (void)dir.Write("model.safetensors", "");
  CHECK(Names(OpenModelFiles({dir.path()})) == std::vector<std::string>{"model.safetensors"});
}

TEST_CASE("ModelFiles: shard names that leave the folder are refused (A16 c)", "[unit]") {
  const TempDir dir;
  for (const std::string& name : {std::string("../etc/passwd"), std::string("/etc/passwd"),
                                  std::string(".."), std::string(), std::string("a/b")}) {
    const Error error = ErrorOf({dir.Write("x.index.json", Index({{"t", name}}))});
    CHECK(error.code == ErrorCode::kBadFile);
    CHECK_THAT(error.message, Contains("'t'"));
  }
}

TEST_CASE("ModelFiles: an index that is none is refused", "[unit]") {
  const TempDir dir;
  for (const std::string& text :
       {std::string(""), std::string("[]"), std::string("{}"), std::string("{\"weight_map\": 3}"),
        std::string("{\"weight_map\": {}}"), std::string("{\"weight_map\": {\"t\": 3}}"),
        std::string(100'000, '[')}) {
    CHECK(ErrorOf({dir.Write("x.index.json", text)}).code == ErrorCode::kBadFile);
  }
}

TEST_CASE("ModelFiles: a missing shard is named together with its index", "[unit]") {
  const TempDir dir;
  const Error error = ErrorOf({dir.Write("x.index.json", Index({{"t", "gone.safetensors"}}))});
  CHECK(error.code == ErrorCode::kNotFound);
  CHECK_THAT(error.message, Contains("gone.safetensors") && Contains("x.index.json"));
}

TEST_CASE("ModelFiles: what is no regular file is refused without waiting", "[unit]") {
  const TempDir dir;
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK(ErrorOf({dir / "fifo"}).code == ErrorCode::kInvalidArgument);
  CHECK(ErrorOf({"/dev/null"}).code == ErrorCode::kInvalidArgument);
  CHECK(ErrorOf({dir / "missing"}).code == ErrorCode::kNotFound);
  CHECK(ErrorOf({}).code == ErrorCode::kInvalidArgument);
}

TEST_CASE("ModelFiles: at most 253 files, of different names", "[unit]") {
  const TempDir dir;
  std::vector<std::string> paths;
  for (int i = 0; i < 254; ++i) {
    paths.push_back(dir.Write("f" + std::to_string(i), ""));
  }
  const Error error = ErrorOf(paths);
  CHECK(error.code == ErrorCode::kLimit);
  CHECK_THAT(error.message, Contains("253"));
  CHECK(ErrorOf({paths[0], paths[0]}).code == ErrorCode::kInvalidArgument);
  paths.pop_back();
  CHECK(OpenModelFiles(paths).ok());
}

TEST_CASE("ModelFiles: of several paths an index comes first, the rest stay in order", "[unit]") {
  const TempDir dir;
  const std::string two = dir.Write("two.safetensors", "2");
  const std::string one = dir.Write("one.safetensors", "1");
  const std::string index = dir.Write("m.index.json", "{}");
  const std::vector<std::string> expected = {"m.index.json", "two.safetensors", "one.safetensors"};
  CHECK(Names(OpenModelFiles({two, index, one})) == expected);
}

TEST_CASE("ModelFiles: paths are made absolute without resolving links", "[unit]") {
  CHECK(AbsolutePath("/a//b/./c/") == "/a/b/c");
  CHECK(AbsolutePath("/a/../b") == "/a/../b");
  CHECK(AbsolutePath("/") == "/");
  CHECK(AbsolutePath("x") == std::filesystem::current_path().string() + "/x");
  CHECK(ModelReference("name") == "name");
  CHECK(ModelReference("/a//b") == "/a/b");
}

TEST_CASE("ModelFiles: a name with a slash is a name unless such a path exists", "[unit]") {
  CHECK(ModelReference("org/model") == "org/model");
  CHECK(ModelReference("./org/model") == AbsolutePath("org/model"));
  CHECK(ModelReference("../org/model") == AbsolutePath("../org/model"));
  const TempDir dir;
  const std::string file = dir.Write("model", "x");
  const std::string relative = std::filesystem::proximate(file).string();
  REQUIRE(relative.find('/') != std::string::npos);
  CHECK(ModelReference(relative) == AbsolutePath(relative));
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directory(dir / "org");
  std::filesystem::copy_file(file, dir / "org/model");
  std::filesystem::current_path(dir / "");
  const std::string found = ModelReference("org/model");
  std::filesystem::current_path(before);
  CHECK(found == AbsolutePath(dir / "org/model"));
}
