// Puts a planned model into reserved arenas: layout, bytes, header pages, manifest.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/ids.h"
#include "common/result.h"
#include "proto/arena_layout.h"
#include "proto/manifest.h"
#include "proto/messages.h"
#include "server/loader/loader_channel.h"
#include "server/loader/model_plan.h"
#include "server/loader/sharing.h"

namespace modelcache {

// A model whose every byte has a place. Holds no descriptor.
struct PlacedModel {
  ManifestSpec spec;                   // digests and the ids of own arenas are filled in later
  ArenaLayout layout;                  // own arenas only
  std::vector<std::uint32_t> written;  // numbers of the storages that will be written, ascending
};

// Decides where everything goes. Takes the tensors and the texts out of `plan`.
// Errors: kInvalidArgument (overflow), kBadFile (a tensor no manifest can hold), kLimit (more
// storages than a manifest can count).
Result<PlacedModel> PlaceModel(ModelPlan& plan, const Sharing& sharing,
                               std::uint64_t arena_max_bytes);

// What to ask the daemon for.
ReserveRequest ReservationFor(const PlacedModel& placed, const Sharing& sharing);

// What WriteArenas reads; everything must outlive the call.
struct WriteInput {
  std::span<const SourceFile> files;
  std::span<const PlannedStorage> storages;
  const Sharing& sharing;
  const Reservation& arenas;  // the own ones
  ModelId model_id;
};

// Told about bytes written so far, from the calling thread, about ten times a second.
using ReportProgress = std::function<Result<void>(const LoaderProgressEvent&)>;

// Writes the storages with several threads through cache-hot leaves, hashing each once, then the
// manifest and the header pages. pwrite and no map: nothing is zeroed first and no fault is taken.
// Errors: kFileChanged, kBadFile (a damaged deflated record; a bad tensor), kNoRoom (the kernel has
// no memory), kSystem.
Result<void> WriteArenas(const WriteInput& input, PlacedModel& placed,
                         const ReportProgress& report);

}  // namespace modelcache
