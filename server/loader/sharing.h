// Finds storages whose bytes exist already: twice in this model, or in an arena of another one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/ids.h"
#include "common/result.h"
#include "proto/manifest.h"
#include "server/loader/loader_channel.h"
#include "server/loader/model_plan.h"

namespace modelcache {

// A place in an arena of another model that holds the same bytes.
struct BorrowedPlace {
  std::uint32_t arena = 0;  // index into Sharing::arenas
  std::uint64_t offset_bytes = 0;
  Digest digest;  // HashStorage of the bytes there, made while they were compared
};

// Per storage of the plan, by its number.
struct Sharing {
  std::vector<std::optional<Digest>> samples;  // of every seekable storage that may be shared
  std::vector<std::uint32_t> same_as;          // number of the storage it repeats; itself if none
  std::vector<std::optional<BorrowedPlace>> borrowed;  // only where same_as is the storage itself
  std::vector<ArenaSpec> arenas;                       // borrowed arenas that are used
};

// Equality is decided by comparing bytes; sizes and samples only choose what is compared. Asks the
// daemon for candidates when `ask` is not null. Deflated storages are never shared.
// Errors: kFileChanged, kSystem, kProtocol (a candidate outside its arena), and the channel's.
Result<Sharing> FindSharing(std::span<const SourceFile> files,
                            std::span<const PlannedStorage> storages, LoaderChannel* ask);

}  // namespace modelcache
