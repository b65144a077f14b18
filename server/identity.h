// What tells one model from another: the identity of its files and the options of the load.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/file_stat.h"
#include "common/ids.h"
#include "proto/messages.h"

namespace modelcache {

// A file as a client named it. Only `stat` (and `name`, when there are several files) decides
// whether two loads are the same; `path` is for people.
struct FileIdentity {
  std::string name;
  std::string path;
  FileStat stat;
};

// How the files are to be read; part of the identity.
struct LoadOptions {
  std::string format = "auto";
  std::string device = "cpu";
  bool operator==(const LoadOptions&) const = default;
};

// The id of what `files` with `stats` (same order, same length) and `options` describe.
ModelId ComputeModelId(std::span<const FileRef> files, std::span<const FileStat> stats,
                       std::string_view format, std::string_view device);

// What people call a model that was given no name: the path of its only file, or the folder of the
// first of several.
std::string DefaultName(std::span<const FileRef> files);

// True when the files themselves are the same, whatever paths led to them.
bool SameFiles(std::span<const FileIdentity> before, std::span<const FileIdentity> now);

// True when `now` is a newer state of what `before` was: the same paths on the same device (of
// several files at least that of the first, the index) with other files behind them. Two models
// that share a folder, or a file, are no versions of each other.
bool Supersedes(std::span<const FileIdentity> now, std::span<const FileIdentity> before);

// The first difference in words, with old and new numbers: "size of m.safetensors 72 -> 69 bytes".
// REQUIRES !SameFiles(before, now).
std::string DescribeChange(std::span<const FileIdentity> before, std::span<const FileIdentity> now);

}  // namespace modelcache
