// Sharing, placing, reserving, writing, in this order.
#include "server/loader/fill.h"

#include <utility>

#include "server/loader/arena_writer.h"
#include "server/loader/sharing.h"

namespace modelcache {

Result<void> CheckAllUnchanged(std::span<const SourceFile> files) {
  for (const SourceFile& file : files) {
    if (auto unchanged = file.CheckUnchanged(); !unchanged.ok()) {
      return unchanged;
    }
  }
  return {};
}

Result<void> FillAndCommit(LoaderChannel& channel, const JobRequest& request,
                           std::span<const SourceFile> files, ModelPlan plan) {
  auto sharing = FindSharing(files, plan.storages, request.share ? &channel : nullptr);
  if (!sharing.ok()) {
    return std::move(sharing).error();
  }
  auto placed = PlaceModel(plan, *sharing, request.arena_max_bytes);
  if (!placed.ok()) {
    const Error& error = placed.error();  // of a tensor, then: it does not know the file
    const bool of_file = error.code == ErrorCode::kBadFile && !files.empty();
    return of_file ? files.front().Bad(error.message) : error;
  }
  CommitRequest commit;
  {
    auto arenas = channel.Reserve(ReservationFor(*placed, *sharing));
    if (!arenas.ok()) {
      return std::move(arenas).error();
    }
    const auto report = [&](const LoaderProgressEvent& event) {
      commit.bytes_read = event.done_bytes;
      return channel.SendProgress(event);
    };
    const WriteInput input{files, plan.storages, *sharing, *arenas, request.model_id};
    if (auto written = WriteArenas(input, *placed, report); !written.ok()) {
      return written;
    }
  }
  for (const SourceFile& file : files) {
    file.WaitUntilSettled();
  }
  if (auto unchanged = CheckAllUnchanged(files); !unchanged.ok()) {
    return unchanged;
  }
  return channel.Commit(commit);
}

}  // namespace modelcache
