// Five pickles in a row (magic number, protocol, system, object, storage keys), then each storage
// as an element count of 8 bytes and its bytes.
#include "server/loader/legacy_torch_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "common/checked_math.h"
#include "server/loader/pickle.h"
#include "server/loader/torch_checkpoint.h"

namespace modelcache {
namespace {

constexpr std::string_view kMagic{"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15};
constexpr std::uint64_t kMaxPickleBytes = 256U << 20U;
constexpr std::int64_t kProtocol = 1001;

// Reads the pickles one after another; `at` moves behind each.
class PickleSequence {
 public:
  explicit PickleSequence(const SourceFile& file) : file_(file) {}

  // A pickle does not say how long it is: the window grows until it ends inside.
  Result<PickleDocument> Next(const char* what) {
    const std::uint64_t left = file_.size() - at_;
    for (std::uint64_t window = 256U << 10U;; window *= 8) {
      const std::uint64_t size = std::min({window, left, kMaxPickleBytes});
      auto text = file_.ReadText({at_, size});
      if (!text.ok()) {
        return std::move(text).error();
      }
      auto document = ReadPickle(*text);
      if (document.ok()) {
        at_ += document->consumed_bytes;
        return document;
      }
      if (size == left || size == kMaxPickleBytes) {
        return file_.Fault(document.error().code, std::string("legacy checkpoint, ") + what +
                                                      " at " + std::to_string(at_) + ": " +
                                                      document.error().message);
      }
    }
  }

  [[nodiscard]] std::uint64_t at() const { return at_; }

 private:
  const SourceFile& file_;
  std::uint64_t at_ = 0;
};

Result<void> CheckSystem(const SourceFile& file, const PickleDocument& system) {
  const PickleNode& root = system.At(system.root);
  for (std::size_t i = 0; i + 1 < root.items.size(); i += 2) {
    if (system.At(root.items[i]).text == "little_endian" &&
        system.At(root.items[i + 1]).integer == 0) {
      return file.Fault(ErrorCode::kUnsupported,
                        "the checkpoint was saved on a big-endian machine, only little-endian "
                        "ones are read");
    }
  }
  return {};
}

// Sizes of elements by storage key, from every persistent id of the object.
Result<std::map<std::string, std::uint64_t>> ElementSizes(const PickleDocument& object) {
  std::map<std::string, std::uint64_t> sizes;
  for (const PickleNode& node : object.nodes) {
    if (node.kind != PickleKind::kPersistent) {
      continue;
    }
    auto id = ReadStorageId(object, node);
    if (!id.ok()) {
      return std::move(id).error();
    }
    sizes.emplace(id->key, DtypeBits(id->dtype) / 8);
  }
  return sizes;
}

// Where the storages lie behind the pickles.
Result<std::map<std::string, ByteRange>> LocateStorages(
    const SourceFile& file, const PickleDocument& keys,
    const std::map<std::string, std::uint64_t>& element_sizes, std::uint64_t at) {
  std::map<std::string, ByteRange> ranges;
  for (const PickleRef ref : keys.At(keys.root).items) {
    const std::string& key = keys.At(ref).text;
    const auto element = element_sizes.find(key);
    if (element == element_sizes.end()) {
      return file.Bad("legacy checkpoint: storage " + Quoted(key) + " belongs to no tensor");
    }
    std::int64_t count = 0;
    if (!Within({at, sizeof count}, file.size())) {
      return file.Bad("legacy checkpoint is cut short: storage " + Quoted(key) +
                      " should start at byte " + std::to_string(at) + ", the file has " +
                      std::to_string(file.size()));
    }
    if (auto read = file.ReadAt(at, std::as_writable_bytes(std::span(&count, 1))); !read.ok()) {
      return std::move(read).error();
    }
    at += sizeof count;
    const auto size =
        count < 0 ? std::nullopt : CheckedMul(static_cast<std::uint64_t>(count), element->second);
    if (!size || !Within({at, *size}, file.size())) {
      return file.Bad("legacy checkpoint: storage " + Quoted(key) + " of " + std::to_string(count) +
                      " elements at byte " + std::to_string(at) + " leaves the file of " +
                      std::to_string(file.size()) + " bytes");
    }
    if (!ranges.emplace(key, ByteRange{at, *size}).second) {
      return file.Bad("legacy checkpoint: storage " + Quoted(key) + " is listed twice");
    }
    at += *size;
  }
  return ranges;
}

class LegacyStorages {
 public:
  LegacyStorages(std::size_t file, const std::map<std::string, ByteRange>& ranges, ModelPlan& plan)
      : file_(file), ranges_(ranges), plan_(plan) {}

  Result<std::uint32_t> Resolve(const StorageId& id) {
    const auto range = ranges_.find(id.key);
    const std::uint64_t present = range == ranges_.end() ? 0 : range->second.size_bytes;
    if (range == ranges_.end() || id.size_bytes != present) {
      return Error{ErrorCode::kBadFile,
                   "storage " + Quoted(id.key) + ": needs " + std::to_string(id.size_bytes) +
                       " bytes, has " + std::to_string(present),
                   0};
    }
    const auto [known, added] =
        numbers_.emplace(id.key, static_cast<std::uint32_t>(plan_.storages.size()));
    if (added) {
      plan_.storages.push_back(
          {"storage " + Quoted(id.key), present, FileBytes{file_, range->second.offset_bytes}});
    }
    return known->second;
  }

 private:
  std::size_t file_;
  const std::map<std::string, ByteRange>& ranges_;
  ModelPlan& plan_;
  std::map<std::string, std::uint32_t> numbers_;
};

struct LegacyPickles {
  PickleDocument object;
  PickleDocument keys;
  std::uint64_t data_offset_bytes = 0;
};

Result<LegacyPickles> ReadPickles(const SourceFile& file) {
  PickleSequence sequence(file);
  LegacyPickles pickles;
  constexpr std::array<const char*, 5> kNames = {"magic number", "protocol", "system", "object",
                                                 "storage keys"};
  for (const char* name : kNames) {
    auto document = sequence.Next(name);
    if (!document.ok()) {
      return std::move(document).error();
    }
    if (name == kNames[1] && document->At(document->root).integer != kProtocol) {
      return file.Fault(ErrorCode::kUnsupported,
                        "legacy checkpoint of protocol " +
                            std::to_string(document->At(document->root).integer) + ", " +
                            std::to_string(kProtocol) + " is read");
    }
    if (name == kNames[2]) {
      if (auto checked = CheckSystem(file, *document); !checked.ok()) {
        return std::move(checked).error();
      }
    }
    pickles.object = std::exchange(pickles.keys, std::move(*document));
  }
  pickles.data_offset_bytes = sequence.at();
  return pickles;
}

}  // namespace

bool LooksLikeLegacyTorch(std::string_view first_bytes) {
  return first_bytes.substr(0, kMagic.size()) == kMagic;
}

Result<ModelPlan> ReadLegacyTorch(std::span<const SourceFile> files, std::size_t file) {
  const SourceFile& source = files[file];
  auto pickles = ReadPickles(source);
  if (!pickles.ok()) {
    return std::move(pickles).error();
  }
  auto sizes = ElementSizes(pickles->object);
  if (!sizes.ok()) {
    return source.Fault(sizes.error().code, sizes.error().message);
  }
  auto ranges = LocateStorages(source, pickles->keys, *sizes, pickles->data_offset_bytes);
  if (!ranges.ok()) {
    return std::move(ranges).error();
  }
  ModelPlan plan;
  plan.format = "torch";
  LegacyStorages storages(file, *ranges, plan);
  auto planned = PlanCheckpoint(
      pickles->object, files, [&](const StorageId& id) { return storages.Resolve(id); }, plan);
  if (!planned.ok()) {
    return source.Fault(planned.error().code, planned.error().message);
  }
  return plan;
}

}  // namespace modelcache
