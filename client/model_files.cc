// Folders, index files and plain files, opened read-only.
#include "client/model_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "client/process_state.h"
#include "common/file_stat.h"
#include "common/socket.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxIndexBytes = 64U << 20U;
constexpr std::string_view kIndexSuffix = ".index.json";

using Shards = std::shared_ptr<const std::vector<std::string>>;

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

Error BadIndex(const std::string& path, const std::string& what) {
  return Error{ErrorCode::kBadFile, path + ": " + what, 0};
}

// A file opened and its kind checked.
struct OpenFile {
  UniqueFd fd;
  struct stat status = {};
};

// Neither a FIFO nor a terminal may make the open wait.
Result<OpenFile> OpenPath(const std::string& path) {
  OpenFile file;
  file.fd.Reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.fd.valid() || ::fstat(file.fd.get(), &file.status) != 0) {
    const int saved = errno;
    return SystemError("open " + path, saved);
  }
  return file;
}

Result<OpenFile> OpenRegular(const std::string& path) {
  Result<OpenFile> file = OpenPath(path);
  if (file.ok() && !S_ISREG(file->status.st_mode)) {
    return Error{ErrorCode::kInvalidArgument, path + " is not a regular file", 0};
  }
  return file;
}

Result<void> Append(ModelFiles& model, const std::string& path, OpenFile file) {
  if (model.files.size() == kMaxDescriptors) {
    return Error{ErrorCode::kLimit,
                 "the model has more than " + std::to_string(kMaxDescriptors) + " files", 0};
  }
  model.files.push_back({BaseName(path), AbsolutePath(path)});
  model.descriptors.push_back(std::move(file.fd));
  return {};
}

Result<std::string> ReadAll(const OpenFile& file, const std::string& path) {
  const auto size = static_cast<std::uint64_t>(file.status.st_size);
  if (size > kMaxIndexBytes) {
    return BadIndex(path, "an index of " + std::to_string(size) + " bytes, limit " +
                              std::to_string(kMaxIndexBytes));
  }
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got =
        ::pread(file.fd.get(), &text[done], text.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      const int saved = errno;
      return SystemError("read " + path, saved);
    }
    if (got == 0) {
      return BadIndex(
          path, "ends after " + std::to_string(done) + " of " + std::to_string(size) + " bytes");
    }
    done += static_cast<std::size_t>(got);
  }
  return text;
}

bool IsShardName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

Result<Shards> ParseIndex(const std::string& text, const std::string& path) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    return BadIndex(path, "is not an index: a JSON object with a \"weight_map\" object is needed");
  }
  std::set<std::string> names;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string() || !IsShardName(shard.get_ref<const std::string&>())) {
      return BadIndex(path,
                      "the shard of tensor '" + tensor + "' is " +
                          shard.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) +
                          ", expected the name of a file beside the index");
    }
    names.insert(shard.get<std::string>());
  }
  if (names.empty()) {
    return BadIndex(path, "names no shard");
  }
  return Shards(std::make_shared<const std::vector<std::string>>(names.begin(), names.end()));
}

// The shards an index names: parsed once per version of the file. The loader checks them again.
Result<Shards> ShardsOf(const OpenFile& index, const std::string& path) {
  const FileStat key = ToFileStat(index.status);
  if (Shards known = ProcessState::Get().FindIndex(key)) {
    return known;
  }
  Result<std::string> text = ReadAll(index, path);
  if (!text.ok()) {
    return std::move(text).error();
  }
  Result<Shards> shards = ParseIndex(*text, path);
  if (shards.ok()) {
    ProcessState::Get().RememberIndex(key, *shards);
  }
  return shards;
}

Result<void> AppendIndex(ModelFiles& model, const std::string& path, OpenFile index) {
  Result<Shards> shards = ShardsOf(index, path);
  if (!shards.ok()) {
    return std::move(shards).error();
  }
  if (auto added = Append(model, path, std::move(index)); !added.ok()) {
    return added;
  }
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  for (const std::string& name : **shards) {
    Result<OpenFile> shard = OpenRegular(folder + name);
    if (!shard.ok()) {
      Error error = std::move(shard).error();
      error.message += " (a shard named by " + path + ")";
      return error;
    }
    if (auto added = Append(model, folder + name, std::move(*shard)); !added.ok()) {
      return added;
    }
  }
  return {};
}

Result<std::vector<std::string>> ListFolder(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), &::closedir);
  if (!stream) {
    const int saved = errno;
    return SystemError("open folder " + folder, saved);
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(stream.get())) {
    names.emplace_back(static_cast<const char*>(entry->d_name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The names with this ending; `preferred` alone when it is one of them.
std::vector<std::string> Candidates(const std::vector<std::string>& names, std::string_view ending,
                                    const std::string& preferred) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name == preferred) {
      return {name};
    }
    if (EndsWith(name, ending)) {
      found.push_back(name);
    }
  }
  return found;
}

struct Kind {
  std::string_view ending;
  const char* preferred;
};

// In the order in which a folder is searched.
constexpr std::array<Kind, 4> kKinds = {{
    {".safetensors.index.json", "model.safetensors.index.json"},
    {".bin.index.json", "pytorch_model.bin.index.json"},
    {".safetensors", "model.safetensors"},
    {"pytorch_model.bin", "pytorch_model.bin"},
}};

Result<std::string> ChooseInFolder(const std::string& folder) {
  Result<std::vector<std::string>> names = ListFolder(folder);
  if (!names.ok()) {
    return std::move(names).error();
  }
  for (const Kind& kind : kKinds) {
    const std::vector<std::string> found = Candidates(*names, kind.ending, kind.preferred);
    if (found.size() == 1) {
      return folder + "/" + found.front();
    }
    if (found.size() > 1) {
      return Error{ErrorCode::kInvalidArgument,
                   folder + " holds " + std::to_string(found.size()) + " files *" +
                       std::string(kind.ending) + " (" + found[0] + ", " + found[1] +
                       (found.size() > 2 ? ", …" : "") + "): name the one to open",
                   0};
    }
  }
  return Error{ErrorCode::kNotFound, folder + " holds no index and no *.safetensors file", 0};
}

Result<void> AppendPath(ModelFiles& model, const std::string& path) {
  Result<OpenFile> file = OpenPath(path);
  if (!file.ok()) {
    return std::move(file).error();
  }
  if (S_ISDIR(file->status.st_mode)) {
    Result<std::string> chosen = ChooseInFolder(path);
    if (!chosen.ok()) {
      return std::move(chosen).error();
    }
    Result<OpenFile> inner = OpenRegular(*chosen);
    if (!inner.ok()) {
      return std::move(inner).error();
    }
    return EndsWith(*chosen, kIndexSuffix) ? AppendIndex(model, *chosen, std::move(*inner))
                                           : Append(model, *chosen, std::move(*inner));
  }
  if (!S_ISREG(file->status.st_mode)) {
    return Error{ErrorCode::kInvalidArgument, path + " is not a regular file", 0};
  }
  return EndsWith(path, kIndexSuffix) ? AppendIndex(model, path, std::move(*file))
                                      : Append(model, path, std::move(*file));
}

Result<void> AppendList(ModelFiles& model, std::vector<std::string> paths) {
  std::stable_partition(paths.begin(), paths.end(),
                        [](const std::string& path) { return EndsWith(path, kIndexSuffix); });
  std::set<std::string> names;
  for (const std::string& path : paths) {
    Result<OpenFile> file = OpenRegular(path);
    if (!file.ok()) {
      return std::move(file).error();
    }
    if (!names.insert(BaseName(path)).second) {
      return Error{ErrorCode::kInvalidArgument,
                   "two files of one model are called " + BaseName(path), 0};
    }
    if (auto added = Append(model, path, std::move(*file)); !added.ok()) {
      return added;
    }
  }
  return {};
}

}  // namespace

Result<ModelFiles> OpenModelFiles(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    return Error{ErrorCode::kInvalidArgument, "no path was given", 0};
  }
  ModelFiles model;
  Result<void> added =
      paths.size() == 1 ? AppendPath(model, paths.front()) : AppendList(model, paths);
  if (!added.ok()) {
    return std::move(added).error();
  }
  return model;
}

std::string AbsolutePath(const std::string& path) {
  std::string whole = path;
  if (path.empty() || path.front() != '/') {
    std::array<char, PATH_MAX> folder{};
    if (::getcwd(folder.data(), folder.size()) != nullptr) {
      whole = std::string(folder.data()) + "/" + path;
    }
  }
  std::string clean;
  std::string_view rest = whole;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('/'), rest.size());
    const std::string_view part = rest.substr(0, end);
    if (!part.empty() && part != ".") {
      clean += '/';
      clean += part;
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return clean.empty() ? "/" : clean;
}

std::string ModelReference(const std::string& model) {
  const bool is_path = model.starts_with('/') || model.starts_with("./") ||
                       model.starts_with("../") ||
                       (model.find('/') != std::string::npos && ::access(model.c_str(), F_OK) == 0);
  return is_path ? AbsolutePath(model) : model;
}

}  // namespace modelcache
