// Checks and maps of the arenas of one model.
#include "client/attach.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "common/memfd.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"

namespace modelcache {
namespace {

Error Mismatch(const std::string& what, const std::string& found, const std::string& expected) {
  return Error{ErrorCode::kCorrupt, what + " is " + found + ", the daemon said " + expected, 0};
}

Result<void> CheckMemfd(const ArenaRef& arena, const MemfdInfo& info) {
  if (info.inode != arena.inode) {
    return Mismatch("inode", std::to_string(info.inode), std::to_string(arena.inode));
  }
  if (info.size_bytes != arena.size_bytes) {
    return Mismatch("size", std::to_string(info.size_bytes), std::to_string(arena.size_bytes));
  }
  // Without the seals whoever holds it could cut it under us: SIGBUS.
  if (!IsSealed(info)) {
    return Error{ErrorCode::kCorrupt, "it is not sealed against writes", 0};
  }
  if (info.size_bytes < kArenaHeaderBytes) {
    return Error{ErrorCode::kCorrupt,
                 "it has " + std::to_string(info.size_bytes) + " bytes, a header needs " +
                     std::to_string(kArenaHeaderBytes),
                 0};
  }
  return {};
}

// An arena that is mapped, and what is known of it.
struct Arena {
  Mapping mapping;
  ArenaKey key;
  std::shared_ptr<const ArenaFacts> facts;
};

Result<std::shared_ptr<const ArenaFacts>> LearnHeader(const Mapping& mapping, const ArenaKey& key) {
  if (auto known = ProcessState::Get().FindArena(key)) {
    return known;
  }
  Result<ArenaHeader> header =
      DecodeArenaHeader(mapping.bytes().first(kArenaHeaderBytes), mapping.size());
  if (!header.ok()) {
    return std::move(header).error();
  }
  auto facts = std::make_shared<const ArenaFacts>(ArenaFacts{*header, nullptr});
  ProcessState::Get().RememberArena(key, facts);
  return std::shared_ptr<const ArenaFacts>(std::move(facts));
}

Result<Arena> MapArena(const ArenaRef& ref, const UniqueFd& fd) {
  Result<MemfdInfo> info = InspectMemfd(fd.get());
  if (!info.ok()) {
    return std::move(info).error();
  }
  if (auto checked = CheckMemfd(ref, *info); !checked.ok()) {
    return std::move(checked).error();
  }
  Result<Mapping> mapping = Mapping::Map(fd.get(), {0, info->size_bytes}, Access::kCopyOnWrite);
  if (!mapping.ok()) {
    return std::move(mapping).error();
  }
  Arena arena;
  arena.mapping = std::move(*mapping);
  arena.key = {info->device, info->inode, info->size_bytes, info->changed_ns};
  auto facts = LearnHeader(arena.mapping, arena.key);
  if (!facts.ok()) {
    return std::move(facts).error();
  }
  arena.facts = std::move(*facts);
  if (arena.facts->header.arena_id != ref.id) {
    return Mismatch("arena id", arena.facts->header.arena_id.Hex(), ref.id.Hex());
  }
  return arena;
}

// Storages that share bytes with one before them in the arena: at one address a write to the one
// would show in the other.
std::vector<std::uint32_t> FindOverlapping(const Manifest& manifest) {
  const auto storages = manifest.storages();
  std::vector<std::uint32_t> order(storages.size());
  std::iota(order.begin(), order.end(), 0U);
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    const StorageRecord& x = storages[a];
    const StorageRecord& y = storages[b];
    return std::tie(x.arena, x.offset_bytes, a) < std::tie(y.arena, y.offset_bytes, b);
  };
  if (!std::is_sorted(order.begin(), order.end(), before)) {  // a loader writes them in order
    std::sort(order.begin(), order.end(), before);
  }
  std::vector<std::uint32_t> overlapping;
  std::uint32_t arena = 0;
  std::uint64_t end = 0;
  for (const std::uint32_t number : order) {
    const StorageRecord& storage = storages[number];
    if (storage.size_bytes == 0) {
      continue;
    }
    if (storage.arena != arena) {
      arena = storage.arena;
      end = 0;
    }
    if (storage.offset_bytes < end) {
      overlapping.push_back(number);
    }
    end = std::max(end, storage.offset_bytes + storage.size_bytes);
  }
  return overlapping;
}

// The manifest in `last`, validated when this process sees it for the first time.
Result<Manifest> ReadManifest(Arena& last) {
  const ArenaHeader& header = last.facts->header;
  if (header.manifest.size_bytes == 0 || !Within(header.manifest, last.mapping.size())) {
    return Error{ErrorCode::kCorrupt, "it holds no manifest", 0};
  }
  last.mapping.PopulateRead(header.manifest);
  const auto bytes =
      last.mapping.bytes().subspan(header.manifest.offset_bytes, header.manifest.size_bytes);
  if (last.facts->manifest) {
    return Manifest::Attach(bytes);
  }
  Result<Manifest> manifest = Manifest::Parse(bytes);
  if (!manifest.ok()) {
    return manifest;
  }
  auto found = std::make_shared<ManifestFacts>();
  found->overlapping = FindOverlapping(*manifest);
  found->payload_bytes = manifest->PayloadBytes();
  last.facts = std::make_shared<const ArenaFacts>(ArenaFacts{header, std::move(found)});
  ProcessState::Get().RememberArena(last.key, last.facts);
  return manifest;
}

Result<void> CheckManifestArenas(const Manifest& manifest, const std::vector<ArenaRef>& refs) {
  const auto arenas = manifest.arenas();
  if (arenas.size() != refs.size()) {
    return Error{ErrorCode::kCorrupt,
                 "the manifest names " + std::to_string(arenas.size()) + " arenas, the daemon " +
                     std::to_string(refs.size()),
                 0};
  }
  for (std::size_t i = 0; i < refs.size(); ++i) {
    if (std::memcmp(arenas[i].id, refs[i].id.bytes.data(), sizeof arenas[i].id) != 0 ||
        arenas[i].size_bytes != refs[i].size_bytes) {
      return Error{ErrorCode::kCorrupt,
                   "arena " + std::to_string(i) + " of the manifest is not the daemon's " +
                       refs[i].id.Hex() + " of " + std::to_string(refs[i].size_bytes) + " bytes",
                   0};
    }
  }
  return {};
}

// Builds a MappedModel arena by arena.
class Mapper {
 public:
  Mapper(const OpenReply& reply, const ArenaOpener& open_arena)
      : reply_(reply), open_arena_(open_arena) {
    model_.arenas.resize(reply.arenas.size());
  }

  Result<MappedModel> Map() {
    // The last arena first: its manifest says which storages of the others need a second map.
    const std::size_t last = reply_.arenas.size() - 1;
    for (std::size_t step = 0; step <= last; ++step) {
      const std::size_t index = step == 0 ? last : step - 1;
      if (auto mapped = MapOne(index, step == 0); !mapped.ok()) {
        Error error = std::move(mapped).error();
        error.message = "arena " + std::to_string(index) + " of model " + reply_.model_id.Hex() +
                        ": " + error.message;
        return error;
      }
    }
    FillAddresses();
    return std::move(model_);
  }

 private:
  Result<void> MapOne(std::size_t index, bool has_manifest) {
    Result<UniqueFd> fd = open_arena_(index);
    if (!fd.ok()) {
      return std::move(fd).error();
    }
    Result<Arena> arena = MapArena(reply_.arenas[index], *fd);
    if (!arena.ok()) {
      return std::move(arena).error();
    }
    if (has_manifest) {
      if (auto taken = TakeManifest(*arena); !taken.ok()) {
        return taken;
      }
    }
    model_.arenas[index] = std::move(arena->mapping);
    return MapCopies(index, *fd);
  }

  Result<void> TakeManifest(Arena& arena) {
    if (arena.facts->header.model_id != reply_.model_id) {
      return Mismatch("model id", arena.facts->header.model_id.Hex(), reply_.model_id.Hex());
    }
    Result<Manifest> manifest = ReadManifest(arena);
    if (!manifest.ok()) {
      return std::move(manifest).error();
    }
    model_.manifest = *manifest;
    model_.facts = arena.facts->manifest;
    model_.storage_data.resize(model_.manifest.storages().size());
    return CheckManifestArenas(model_.manifest, reply_.arenas);
  }

  Result<void> MapCopies(std::size_t index, const UniqueFd& fd) {
    for (const std::uint32_t number : model_.facts->overlapping) {
      const StorageRecord& storage = model_.manifest.storages()[number];
      if (storage.arena != index) {
        continue;
      }
      Result<Mapping> copy =
          Mapping::Map(fd.get(), {storage.offset_bytes, storage.size_bytes}, Access::kCopyOnWrite);
      if (!copy.ok()) {
        return std::move(copy).error();
      }
      model_.storage_data[number] = copy->data();
      model_.copies.push_back(std::move(*copy));
    }
    return {};
  }

  void FillAddresses() {
    const auto storages = model_.manifest.storages();
    for (std::size_t i = 0; i < storages.size(); ++i) {
      if (model_.storage_data[i] == nullptr) {
        model_.storage_data[i] = model_.arenas[storages[i].arena].data() + storages[i].offset_bytes;
      }
    }
  }

  const OpenReply& reply_;
  const ArenaOpener& open_arena_;
  MappedModel model_;
};

}  // namespace

Result<MappedModel> MapModel(const OpenReply& reply, const ArenaOpener& open_arena) {
  if (reply.arenas.empty()) {
    return Error{ErrorCode::kProtocol, "the daemon answered without an arena", 0};
  }
  if (reply.lease == 0) {
    return Error{ErrorCode::kProtocol, "the daemon answered without a lease", 0};
  }
  return Mapper(reply, open_arena).Map();
}

Result<UniqueFd> OpenThroughProcfs(std::int64_t pid, std::int32_t fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  UniqueFd opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!opened.valid()) {
    const int saved = errno;
    return SystemError("open " + path, saved);
  }
  return opened;
}

}  // namespace modelcache
