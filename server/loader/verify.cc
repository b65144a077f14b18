// Two questions: are the arenas what the manifest says, and what the files say?
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "common/digest.h"
#include "common/mapping.h"
#include "common/memfd.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/manifest.h"
#include "server/loader/format.h"
#include "server/loader/job.h"
#include "server/loader/json_guard.h"
#include "server/loader/parallel.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxDifferences = 100;

// The arenas of one model, mapped, and the manifest inside the last one.
struct ArenaSet {
  std::vector<Mapping> mappings;
  Manifest manifest;

  [[nodiscard]] std::span<const std::byte> Bytes(const StorageRecord& storage) const {
    return mappings[storage.arena].bytes().subspan(storage.offset_bytes, storage.size_bytes);
  }
};

Result<ArenaSet> MapArenas(const std::vector<UniqueFd>& arenas) {
  ArenaSet set;
  std::vector<ArenaId> ids;
  std::span<const std::byte> manifest;
  for (const UniqueFd& fd : arenas) {
    auto info = InspectMemfd(fd.get());
    if (!info.ok()) {
      return std::move(info).error();
    }
    auto mapping = Mapping::Map(fd.get(), {0, info->size_bytes}, Access::kRead);
    if (!mapping.ok()) {
      return std::move(mapping).error();
    }
    auto header = DecodeArenaHeader(mapping->bytes(), info->size_bytes);
    if (!header.ok()) {
      return std::move(header).error();
    }
    ids.push_back(header->arena_id);
    manifest = mapping->bytes().subspan(header->manifest.offset_bytes, header->manifest.size_bytes);
    set.mappings.push_back(std::move(*mapping));
  }
  auto parsed = Manifest::Parse(manifest);
  if (!parsed.ok()) {
    return std::move(parsed).error();
  }
  set.manifest = *parsed;
  const auto records = set.manifest.arenas();
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (i >= ids.size() || records[i].size_bytes != set.mappings[i].size() ||
        std::memcmp(records[i].id, ids[i].bytes.data(), ids[i].bytes.size()) != 0) {
      return Error{ErrorCode::kCorrupt,
                   "arena " + std::to_string(i) + " of " + std::to_string(records.size()) +
                       " is not the one the manifest names",
                   0};
    }
  }
  return set;
}

// Findings of one verification, at most kMaxDifferences of them.
class Findings {
 public:
  explicit Findings(const Manifest& manifest) {
    for (const TensorRecord& tensor : manifest.tensors()) {
      if (tensor.storage != kNoStorage) {
        users_[tensor.storage].push_back(std::string(manifest.Name(tensor)));
      }
    }
  }

  void Add(std::string sentence) {
    if (sentences_.size() < kMaxDifferences) {
      sentences_.push_back(std::move(sentence));
    }
  }

  void AddStorage(std::uint32_t storage, const std::string& what) {
    const auto found = users_.find(storage);
    std::string who = "storage " + std::to_string(storage);
    if (found != users_.end()) {
      who = "tensor " + Quoted(found->second.front());
      if (found->second.size() > 1) {
        who += " and " + std::to_string(found->second.size() - 1) + " more of its storage";
      }
    }
    Add(who + ": " + what);
  }

  [[nodiscard]] bool empty() const { return sentences_.empty(); }
  std::vector<std::string> Take() { return std::move(sentences_); }

 private:
  std::map<std::uint32_t, std::vector<std::string>> users_;
  std::vector<std::string> sentences_;
};

void CheckDigests(const ArenaSet& set, Findings& findings, VerifiedEvent& event) {
  const auto storages = set.manifest.storages();
  std::vector<char> matches(storages.size());
  // Hashing cannot fail, so the answer of ParallelFor carries nothing.
  (void)ParallelFor(storages.size(), [&](std::size_t item, std::span<std::byte> /*scratch*/) {
    const Digest digest = HashStorage(set.Bytes(storages[item]));
    matches[item] = std::memcmp(digest.bytes.data(), storages[item].digest, 16) == 0 ? 1 : 0;
    return Result<void>();
  });
  for (std::uint32_t i = 0; i < storages.size(); ++i) {
    event.bytes += storages[i].size_bytes;
    if (matches[i] == 0) {
      findings.AddStorage(i, "the arena no longer has the digest of the manifest");
    }
  }
  event.storages = storages.size();
}

std::vector<FileRef> RecordedFiles(const JobRequest& request, const Manifest& manifest) {
  if (!request.files.empty()) {
    return request.files;
  }
  std::vector<FileRef> files;
  const auto metadata = ParseJson(manifest.metadata_json(), kMaxMetadataDepth);
  if (metadata.ok() && metadata->is_object() && metadata->contains("files")) {
    for (const auto& file : (*metadata)["files"]) {
      files.push_back({file.value("name", ""), file.value("path", "")});
    }
  }
  return files;
}

Result<std::vector<SourceFile>> OpenRecorded(const std::vector<FileRef>& refs,
                                             std::vector<UniqueFd> fds) {
  std::vector<SourceFile> files;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    // Not blocking: the path may be a fifo by now.
    UniqueFd fd = i < fds.size()
                      ? std::move(fds[i])
                      : UniqueFd(::open(refs[i].path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd.valid()) {
      return SystemError("open of " + refs[i].path, errno);
    }
    auto file = SourceFile::Open(std::move(fd), refs[i]);
    if (!file.ok()) {
      return std::move(file).error();
    }
    files.push_back(std::move(*file));
  }
  if (files.empty()) {
    return Error{ErrorCode::kNotFound, "no file is recorded", 0};
  }
  return files;
}

// Compares what the files describe with what the arenas hold.
class DiskComparison {
 public:
  DiskComparison(const ArenaSet& set, std::span<const SourceFile> files, const ModelPlan& plan,
                 Findings& findings)
      : set_(set), files_(files), plan_(plan), findings_(findings) {}

  Result<void> Run() {
    std::set<std::string_view> names;
    for (const TensorSpec& tensor : plan_.tensors) {
      names.insert(tensor.name);
      CompareTensor(tensor);
    }
    for (const TensorRecord& tensor : set_.manifest.tensors()) {
      if (names.count(set_.manifest.Name(tensor)) == 0) {
        findings_.Add("tensor " + Quoted(set_.manifest.Name(tensor)) + ": not in the file");
      }
    }
    return CompareStorages();
  }

 private:
  void CompareTensor(const TensorSpec& tensor) {
    const auto number = set_.manifest.Find(tensor.name);
    if (!number) {
      findings_.Add("tensor " + Quoted(tensor.name) + ": only in the file");
      return;
    }
    const TensorRecord& record = set_.manifest.tensors()[*number];
    const bool same = record.dtype == static_cast<std::uint16_t>(tensor.dtype) &&
                      std::ranges::equal(set_.manifest.Shape(record), tensor.shape) &&
                      std::ranges::equal(set_.manifest.Stride(record), tensor.stride) &&
                      record.data_offset_bytes == tensor.data_offset_bytes &&
                      (record.storage == kNoStorage) == (tensor.storage == kNoStorage);
    if (!same) {
      findings_.Add("tensor " + Quoted(tensor.name) + ": dtype, shape, stride or offset differ");
    } else if (tensor.storage != kNoStorage) {
      pairs_.emplace(record.storage, tensor.storage);
    }
  }

  Result<void> CompareStorages() {
    const std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs(pairs_.begin(), pairs_.end());
    std::vector<char> equal(pairs.size(), 0);
    auto done = ParallelFor(pairs.size(), [&](std::size_t item, std::span<std::byte> scratch) {
      auto same = SameBytes(pairs[item].first, pairs[item].second, scratch);
      if (!same.ok()) {
        return Result<void>(std::move(same).error());
      }
      equal[item] = *same ? 1 : 0;
      return Result<void>();
    });
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      if (equal[i] == 0 && done.ok()) {
        findings_.AddStorage(pairs[i].first, "its bytes differ from the file's");
      }
    }
    return done;
  }

  [[nodiscard]] Result<bool> SameBytes(std::uint32_t kept, std::uint32_t planned,
                                       std::span<std::byte> scratch) const {
    const auto arena = set_.Bytes(set_.manifest.storages()[kept]);
    const PlannedStorage& storage = plan_.storages[planned];
    if (arena.size() != storage.size_bytes) {
      return false;
    }
    std::uint64_t at = 0;
    bool equal = true;
    auto streamed = StreamStorage(files_, storage, scratch, [&](std::span<const std::byte> leaf) {
      equal = equal && std::memcmp(arena.data() + at, leaf.data(), leaf.size()) == 0;
      at += leaf.size();
      return Result<void>();
    });
    return streamed.ok() ? Result<bool>(equal) : Result<bool>(std::move(streamed).error());
  }

  const ArenaSet& set_;
  std::span<const SourceFile> files_;
  const ModelPlan& plan_;
  Findings& findings_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> pairs_;
};

std::string CompareWithDisk(const JobRequest& request, std::vector<UniqueFd> fds,
                            const ArenaSet& set, Findings& findings) {
  auto files = OpenRecorded(RecordedFiles(request, set.manifest), std::move(fds));
  if (!files.ok()) {
    return "unavailable";
  }
  auto plan = ReadModel(*files, {request.format, request.device});
  if (!plan.ok()) {
    findings.Add(plan.error().message);
    return "differs";
  }
  Findings on_disk(set.manifest);
  auto compared = DiskComparison(set, *files, *plan, on_disk).Run();
  if (!compared.ok()) {
    on_disk.Add(compared.error().message);
  }
  const bool same = on_disk.empty();
  for (std::string& sentence : on_disk.Take()) {
    findings.Add(std::move(sentence));
  }
  return same ? "same" : "differs";
}

}  // namespace

Result<VerifiedEvent> RunVerify(const JobRequest& request, std::vector<UniqueFd> files,
                                const std::vector<UniqueFd>& arenas) {
  auto set = MapArenas(arenas);
  if (!set.ok()) {
    return std::move(set).error();
  }
  VerifiedEvent event;
  Findings findings(set->manifest);
  CheckDigests(*set, findings, event);
  event.memory_ok = findings.empty();
  event.disk = CompareWithDisk(request, std::move(files), *set, findings);
  event.differences = findings.Take();
  event.ok = event.differences.empty();
  return event;
}

}  // namespace modelcache
