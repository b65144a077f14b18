// Reads the bytes of a planned storage, wherever they come from.
#pragma once

#include <functional>
#include <span>

#include "common/ids.h"
#include "common/result.h"
#include "server/loader/model_plan.h"

namespace modelcache {

// Takes one piece of a storage. The pieces come in order and are whole digest leaves, but the last.
using LeafSink = std::function<Result<void>(std::span<const std::byte>)>;

// True when any range of the storage can be read at once; deflated ones must be read from the
// start.
bool IsSeekable(const PlannedStorage& storage);

// Fills `out` from `offset_bytes` of a seekable storage. Any thread.
// Errors: kFileChanged, kSystem. REQUIRES that the range lies inside the storage.
Result<void> ReadStorage(std::span<const SourceFile> files, const PlannedStorage& storage,
                         std::uint64_t offset_bytes, std::span<std::byte> out);

// Gives the whole storage to `sink`, leaf by leaf; `scratch` holds one leaf. Stops at the first
// error. Errors: also kBadFile when a deflated record is damaged or has another length, and
// whatever `sink` answers.
Result<void> StreamStorage(std::span<const SourceFile> files, const PlannedStorage& storage,
                           std::span<std::byte> scratch, const LeafSink& sink);

// SampleStorage of a seekable storage, reading only what it looks at. Errors: as ReadStorage.
Result<Digest> SamplePlanned(std::span<const SourceFile> files, const PlannedStorage& storage);

}  // namespace modelcache
