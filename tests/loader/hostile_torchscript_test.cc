// TorchScript archives made or damaged to break libtorch: it is never handed what it would crash
// on.
#include <dlfcn.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "server/loader/source_file.h"
#include "server/loader/torchscript_module.h"
#include "server/loader/zip_directory.h"
#include "tests/loader/loader_harness.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

std::string FixtureBytes(const std::string& name) {
  const char* folder = std::getenv("MODELCACHE_FIXTURES");
  std::ifstream file(std::string(folder != nullptr ? folder : "fixtures") + "/" + name,
                     std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Every tensor by name, as bytes.
std::map<std::string, std::string> Contents(const LoadedModel& model) {
  std::map<std::string, std::string> contents;
  for (const std::string& name : model.Names()) {
    contents[name] = model.Raw(name);
  }
  return contents;
}

// For each byte of the archive: the record whose content it is, "" for everything else.
std::vector<std::string> RecordAt(const std::string& path, std::size_t size) {
  auto fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  auto file = SourceFile::Open(std::move(fd), {"ts.pt", path});
  REQUIRE(file.ok());
  auto directory = ZipDirectory::Read(*file);
  REQUIRE(directory.ok());
  std::vector<std::string> names(size);
  for (const ZipRecord& record : directory->records()) {
    std::fill_n(names.begin() + static_cast<std::ptrdiff_t>(record.data_offset_bytes),
                record.stored_bytes, record.name);
  }
  return names;
}

// What libtorch's side answers when nothing looked at the archive before it.
TorchscriptFault ReadUnchecked(const std::string& bytes, std::string& message) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  const auto lib = program.parent_path().parent_path() / "lib";
  void* library = nullptr;
  for (const auto& folder : {lib / "modelcache", lib}) {
    const std::string path = (folder / "modelcached_torchscript.so").string();
    library = library != nullptr ? library : ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  REQUIRE(library != nullptr);
  const auto read = reinterpret_cast<TorchscriptEntry>(::dlsym(library, kTorchscriptEntry));
  REQUIRE(read != nullptr);
  TorchscriptInput input;
  input.size_bytes = bytes.size();
  input.read = [&](std::uint64_t offset, void* out, std::size_t size) -> std::size_t {
    return offset <= bytes.size() && size <= bytes.size() - offset
               ? bytes.copy(static_cast<char*>(out), size, offset)
               : 0;
  };
  TorchscriptModule module;
  return read(input, module, message);
}

}  // namespace

TEST_CASE("TorchScript: no flipped byte ends the loader or changes another tensor", "[torch]") {
  const TempDir dir;
  const std::string good = FixtureBytes("ts.pt");
  const std::string path = dir.Write("ts.pt", good);
  const auto model = Load(path);
  REQUIRE(model.ok());
  const auto expected = Contents(*model);
  const auto records = RecordAt(path, good.size());
  std::size_t loaded = 0;
  std::size_t refused = 0;
  for (std::size_t at = 0; at < good.size(); ++at) {
    // Code and padding are long: some of their bytes.
    const bool pickle =
        records[at].ends_with("/data.pkl") || records[at].ends_with("/constants.pkl");
    if (!pickle && !records[at].empty() && at % 11 != 0) {
      continue;
    }
    if (records[at].empty() && at % 7 != 0) {
      continue;
    }
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (at % 2 != 0 ? 0x55 : 0x80));
    INFO("byte " << at << " of " << good.size() << ", record '" << records[at] << "'");
    const auto found = Load(dir.Write("ts.pt", bad));
    if (!found.ok()) {
      ++refused;
      CHECK_THAT(found.error().message, Contains("ts.pt"));
      continue;
    }
    ++loaded;
    if (records[at].empty()) {
      CHECK(Contents(*found) == expected);
    }
  }
  CHECK(loaded > 0);
  CHECK(refused > 100);
}

TEST_CASE("TorchScript: no truncation ends the loader", "[torch]") {
  const TempDir dir;
  const std::string good = FixtureBytes("ts.pt");
  for (std::size_t size = 0; size < good.size(); size += 7) {
    CHECK(LoadError(dir.Write("ts.pt", good.substr(0, size))) != "(loaded)");
  }
}

TEST_CASE("TorchScript: libtorch's side refuses short records on its own, of every kind",
          "[torch]") {
  std::string message;
  CHECK(ReadUnchecked(FixtureBytes("ts.pt"), message) == TorchscriptFault::kNone);
  // A constant of a method, one of a free function, a parameter.
  for (const char* name : {"short_constants.pt", "short_free.pt", "short_data.pt"}) {
    INFO(name);
    CHECK(ReadUnchecked(FixtureBytes(name), message) == TorchscriptFault::kBadFile);
    CHECK_THAT(message, Contains("a tensor needs 12 bytes, its record has 4"));
  }
}

TEST_CASE("TorchScript: records that torch would take for one are refused", "[torch]") {
  const TempDir dir;
  CHECK_THAT(LoadError(dir.Write("case.pt", FixtureBytes("case.pt"))),
             Contains("/DATA/0'") && Contains("case alone"));
}

}  // namespace modelcache
