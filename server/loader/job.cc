// Dispatch by kind, and the load itself.
#include "server/loader/job.h"

#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "server/loader/fill.h"
#include "server/loader/format.h"
#include "server/loader/json_guard.h"

namespace modelcache {
namespace {

Result<std::vector<SourceFile>> OpenSources(const JobRequest& request, std::vector<UniqueFd> fds) {
  std::vector<SourceFile> files;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    auto file = SourceFile::Open(std::move(fds[i]), request.files[i]);
    if (!file.ok()) {
      return std::move(file).error();
    }
    file->AdviseSequential();
    files.push_back(std::move(*file));
  }
  return files;
}

Result<void> RecordFiles(std::span<const SourceFile> files, ModelPlan& plan) {
  auto metadata = ParseJson(plan.metadata_json, kMaxMetadataDepth);
  if (!metadata.ok()) {
    return Error{ErrorCode::kInternal, "metadata of a reader: " + metadata.error().message, 0};
  }
  auto& list = (*metadata)["files"] = nlohmann::json::array();
  for (const SourceFile& file : files) {
    list.push_back({{"name", file.name()}, {"path", file.path()}, {"size", file.size()}});
  }
  plan.metadata_json = DumpJson(*metadata);
  return {};
}

std::vector<UniqueFd> TakeLast(std::vector<UniqueFd>& descriptors, std::size_t count) {
  std::vector<UniqueFd> last;
  const auto first = std::prev(descriptors.end(), static_cast<std::ptrdiff_t>(count));
  std::move(first, descriptors.end(), std::back_inserter(last));
  descriptors.erase(first, descriptors.end());
  return last;
}

Result<void> Dispatch(LoaderChannel& channel, Job job) {
  const JobRequest& request = job.request;
  const std::size_t arena_count = request.arenas.size();
  const std::size_t found = job.descriptors.size();
  const bool with_files = found == request.files.size() + arena_count;
  // The daemon keeps no descriptors of files: only a load always has them.
  const bool without_files = request.kind != JobKind::kLoad && found == arena_count;
  if (!with_files && !without_files) {
    return Error{ErrorCode::kProtocol,
                 "a job of " + std::to_string(request.files.size()) + " files and " +
                     std::to_string(arena_count) + " arenas came with " + std::to_string(found) +
                     " descriptors",
                 0};
  }
  const auto arenas = TakeLast(job.descriptors, arena_count);
  switch (request.kind) {
    case JobKind::kLoad:
      return RunLoad(channel, request, std::move(job.descriptors));
    case JobKind::kVerify: {
      auto verified = RunVerify(request, std::move(job.descriptors), arenas);
      return verified.ok() ? channel.SendVerified(*verified)
                           : Result<void>(std::move(verified).error());
    }
    case JobKind::kCollapse:
      RunCollapse(arenas);
      return {};
  }
  return Error{ErrorCode::kProtocol,
               "unknown job kind " + std::to_string(static_cast<int>(request.kind)), 0};
}

Result<void> DispatchGuarded(LoaderChannel& channel, Job job) {
  // Allocations are the only source of exceptions left here; a reader that met a file too large for
  // this process must still say so.
  try {
    return Dispatch(channel, std::move(job));
  } catch (const std::bad_alloc&) {
    return Error{ErrorCode::kSystem, "the loader has no memory left", 0};
  } catch (const std::exception& fault) {
    return Error{ErrorCode::kInternal, std::string("the loader failed: ") + fault.what(), 0};
  }
}

}  // namespace

Result<void> RunLoad(LoaderChannel& channel, const JobRequest& request,
                     std::vector<UniqueFd> files) {
  auto sources = OpenSources(request, std::move(files));
  if (!sources.ok()) {
    return std::move(sources).error();
  }
  auto plan = ReadModel(*sources, {request.format, request.device});
  if (plan.ok()) {
    if (auto recorded = RecordFiles(*sources, *plan); !recorded.ok()) {
      return recorded;
    }
    return FillAndCommit(channel, request, *sources, std::move(*plan));
  }
  // What looks malformed may be a file that somebody is writing.
  auto unchanged = CheckAllUnchanged(*sources);
  return unchanged.ok() ? Result<void>(std::move(plan).error()) : unchanged;
}

Result<void> RunJob(LoaderChannel& channel) {
  auto job = channel.ReceiveJob();
  if (!job.ok()) {
    return std::move(job).error();
  }
  auto done = DispatchGuarded(channel, std::move(*job));
  if (!done.ok()) {
    (void)channel.SendFailed(done.error());  // the exit status tells it too
  }
  return done;
}

}  // namespace modelcache
