// From the paths a user gives to the open files of a model.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/messages.h"

namespace modelcache {

// Files of one model, open for reading; `descriptors` in the order of `files`.
struct ModelFiles {
  std::vector<FileRef> files;
  std::vector<UniqueFd> descriptors;
};

// Opens the model `paths` name. One path: a file; an index file (*.index.json) with the shards it
// names, which lie beside it; or a folder, in which an index, else the one weights file is looked
// for. Several paths: the files of one model, an index with its shards or safetensors files alone.
// An index comes first in the result. Errors: kNotFound, kPermission, kInvalidArgument (not a
// regular file, no or too many candidates, two files of one name), kBadFile (the index), kLimit
// (over 253 files, or too few descriptors), kSystem.
Result<ModelFiles> OpenModelFiles(const std::vector<std::string>& paths);

// `path` made absolute and without "." and empty parts; ".." and symlinks stay.
std::string AbsolutePath(const std::string& path);

// How the daemon knows a model a user names: a path made absolute, a name or an id as it is. A path
// begins with "/", "./" or "../", or has a slash and exists: names may have slashes too.
std::string ModelReference(const std::string& model);

// What `ask(reference)`, which returns a Result, says of the model a user names. What no model is
// called is asked for once more as the path of a file, by which it may have been loaded: the file
// may be gone. Errors: those of `ask`.
template <typename Ask>
auto AskForModel(const std::string& model, const Ask& ask) {
  const std::string reference = ModelReference(model);
  auto answer = ask(reference);
  const std::string path = AbsolutePath(model);
  if (answer.ok() || answer.error().code != ErrorCode::kNotFound || path == reference) {
    return answer;
  }
  auto by_path = ask(path);
  return by_path.ok() || by_path.error().code != ErrorCode::kNotFound ? std::move(by_path)
                                                                      : std::move(answer);
}

}  // namespace modelcache
