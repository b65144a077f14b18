// From the daemon's answer to memory: opens, checks and maps the arenas of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/process_state.h"
#include "common/mapping.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/manifest.h"
#include "proto/messages.h"

namespace modelcache {

// The memory of one model, private to this process and copy-on-write.
struct MappedModel {
  std::vector<Mapping> arenas;      // in the order of the manifest
  std::vector<Mapping> copies;      // of storages whose bytes another storage covers too
  Manifest manifest;                // lies in the last arena
  std::vector<void*> storage_data;  // first byte of each storage
  std::shared_ptr<const ManifestFacts> facts;
};

// Gives a read-only descriptor of the arena with this number, from wherever it can be had.
using ArenaOpener = std::function<Result<UniqueFd>(std::size_t index)>;

// Maps the arenas of `reply`. Nothing is believed: each descriptor must be a memfd with the inode,
// size and seals of an arena before any byte of it is read, its header page must name the arena
// and the model, and the manifest is validated, once per process and arena. One arena is open at a
// time. Errors: kProtocol (the reply), kCorrupt (what the descriptors hold, with the arena's number
// and both values), what `open_arena` gives, kSystem.
Result<MappedModel> MapModel(const OpenReply& reply, const ArenaOpener& open_arena);

// Opens descriptor `fd` of process `pid` through procfs, read-only and without waiting for
// whatever it may be. Errors: kNotFound, kPermission, kLimit, kSystem.
Result<UniqueFd> OpenThroughProcfs(std::int64_t pid, std::int32_t fd);

}  // namespace modelcache
