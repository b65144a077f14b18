// Creating, sealing, validating and closing arenas.
#include "server/arena_store.h"

#include <sys/random.h>

#include <cerrno>
#include <string>
#include <utility>

#include "common/mapping.h"
#include "common/memfd.h"
#include "proto/arena_layout.h"
#include "proto/manifest.h"

namespace modelcache {
namespace {

Error Corrupt(const ArenaId& arena, const std::string& what) {
  return Error{ErrorCode::kCorrupt, "arena " + arena.Hex() + ": " + what, 0};
}

Result<ArenaId> RandomArenaId() {
  ArenaId id;
  if (::getrandom(id.bytes.data(), id.bytes.size(), 0) != static_cast<ssize_t>(id.bytes.size())) {
    return SystemError("getrandom", errno);
  }
  return id;
}

ArenaId IdOf(const ArenaRecord& record) {
  ArenaId id;
  std::copy(std::begin(record.id), std::end(record.id), id.bytes.begin());
  return id;
}

std::vector<StoragePlace> PlacesOf(const Manifest& manifest) {
  std::vector<StoragePlace> places;
  for (const StorageRecord& record : manifest.storages()) {
    StoragePlace place;
    place.arena = IdOf(manifest.arenas()[record.arena]);
    place.offset_bytes = record.offset_bytes;
    place.size_bytes = record.size_bytes;
    std::copy(std::begin(record.sample), std::end(record.sample), place.sample.bytes.begin());
    places.push_back(place);
  }
  return DistinctPlaces(places);
}

}  // namespace

Result<std::vector<ArenaEntry>> ArenaStore::Create(std::span<const ReserveArena> wanted) {
  std::vector<ArenaEntry> entries;
  std::vector<Arena> made;
  for (const ReserveArena& arena : wanted) {
    Result<ArenaId> id = RandomArenaId();
    if (!id.ok()) {
      return std::move(id).error();
    }
    Result<UniqueFd> fd = CreateMemfd("modelcache-" + id->Hex(), arena.size_bytes, sys_);
    if (!fd.ok()) {
      return std::move(fd).error();
    }
    Result<MemfdInfo> info = InspectMemfd(fd->get(), sys_);
    if (!info.ok()) {
      return std::move(info).error();
    }
    ArenaEntry entry;
    entry.id = *id;
    entry.fd = fd->get();
    entry.inode = info->inode;
    entry.size_bytes = arena.size_bytes;
    entry.cost_bytes = arena.charge_bytes;
    entries.push_back(entry);
    made.push_back({std::move(*fd), arena.size_bytes});
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    arenas_.emplace(entries[i].id, std::move(made[i]));
  }
  return entries;
}

Result<ArenaHeader> ArenaStore::SealOne(const SealArenas& request, std::size_t index) {
  const ArenaId& id = request.own[index];
  const Arena& arena = arenas_.at(id);
  // Sealed first, so that what is validated is what stays.
  if (auto sealed = SealMemfd(arena.fd.get(), sys_); !sealed.ok()) {
    return std::move(sealed).error();
  }
  if (arena.size_bytes < kArenaHeaderBytes) {
    return Corrupt(id, "it has " + std::to_string(arena.size_bytes) + " bytes, a header needs " +
                           std::to_string(kArenaHeaderBytes));
  }
  Result<Mapping> page = Mapping::Map(arena.fd.get(), {0, kArenaHeaderBytes}, Access::kRead, sys_);
  if (!page.ok()) {
    return std::move(page).error();
  }
  Result<ArenaHeader> header = DecodeArenaHeader(page->bytes(), arena.size_bytes);
  if (!header.ok()) {
    return header;
  }
  if (header->arena_id != id || header->model_id != request.model) {
    return Corrupt(id, "its header names arena " + header->arena_id.Hex() + " of model " +
                           header->model_id.Hex() + ", expected model " + request.model.Hex());
  }
  if (header->arena_index != index || header->arena_count != request.own.size()) {
    return Corrupt(id, "its header says it is number " + std::to_string(header->arena_index) +
                           " of " + std::to_string(header->arena_count) + ", it is number " +
                           std::to_string(index) + " of " + std::to_string(request.own.size()));
  }
  return header;
}

Result<SealedModel> ArenaStore::ReadManifest(const SealArenas& request, const ArenaHeader& last) {
  const ArenaId& id = request.own.back();
  const Arena& arena = arenas_.at(id);
  if (last.manifest.size_bytes == 0 || !Within(last.manifest, arena.size_bytes)) {
    return Corrupt(id, "the last arena holds no manifest");
  }
  Result<Mapping> bytes = Mapping::Map(arena.fd.get(), last.manifest, Access::kRead, sys_);
  if (!bytes.ok()) {
    return std::move(bytes).error();
  }
  Result<Manifest> manifest = Manifest::Parse(bytes->bytes());
  if (!manifest.ok()) {
    return std::move(manifest).error();
  }
  std::vector<ArenaId> expected = request.borrowed;
  expected.insert(expected.end(), request.own.begin(), request.own.end());
  if (manifest->arenas().size() != expected.size()) {
    return Corrupt(id, "the manifest names " + std::to_string(manifest->arenas().size()) +
                           " arenas, " + std::to_string(expected.size()) + " were reserved");
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const ArenaRecord& record = manifest->arenas()[i];
    auto known = arenas_.find(expected[i]);
    if (IdOf(record) != expected[i] || known == arenas_.end() ||
        record.size_bytes != known->second.size_bytes) {
      return Corrupt(id, "the manifest's arena " + std::to_string(i) + " is " + IdOf(record).Hex() +
                             " of " + std::to_string(record.size_bytes) + " bytes, expected " +
                             expected[i].Hex());
    }
  }
  SealedModel model;
  model.format = manifest->format();
  model.tensors = manifest->tensors().size();
  model.storages = manifest->storages().size();
  model.places = PlacesOf(*manifest);
  return model;
}

Result<SealedModel> ArenaStore::Seal(const SealArenas& request) {
  ArenaHeader last;
  for (std::size_t i = 0; i < request.own.size(); ++i) {
    Result<ArenaHeader> header = SealOne(request, i);
    if (!header.ok()) {
      return std::move(header).error();
    }
    last = *header;
  }
  Result<SealedModel> model = ReadManifest(request, last);
  if (!model.ok()) {
    return model;
  }
  for (const ArenaId& id : request.own) {
    Result<std::uint64_t> allocated = AllocatedBytes(id);
    if (!allocated.ok()) {
      return std::move(allocated).error();
    }
    model->allocated_bytes.emplace_back(id, *allocated);
  }
  return model;
}

int ArenaStore::Fd(const ArenaId& id) const {
  auto found = arenas_.find(id);
  return found == arenas_.end() ? -1 : found->second.fd.get();
}

Result<std::uint64_t> ArenaStore::AllocatedBytes(const ArenaId& id) {
  auto found = arenas_.find(id);
  if (found == arenas_.end()) {
    return Error{ErrorCode::kNotFound, "arena " + id.Hex() + " is gone", 0};
  }
  Result<MemfdInfo> info = InspectMemfd(found->second.fd.get(), sys_);
  if (!info.ok()) {
    return std::move(info).error();
  }
  return info->allocated_bytes;
}

void ArenaStore::Close(const ArenaId& id) {
  auto found = arenas_.find(id);
  if (found != arenas_.end()) {
    reaper_.Close(id, std::move(found->second.fd));
    arenas_.erase(found);
  }
}

}  // namespace modelcache
