// From a plan to a committed model: what every kind of load ends with.
#pragma once

#include <span>

#include "common/result.h"
#include "server/loader/loader_channel.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// Looks for equal storages, reserves, writes and commits; returns once the arenas are sealed.
// `files` are what the storages of `plan` refer to. Errors: kFileChanged, kNoRoom, kBadFile (a
// tensor no manifest can hold), kLimit, kSystem and the channel's. Before anything is reserved a
// failed call may be repeated with another plan.
Result<void> FillAndCommit(LoaderChannel& channel, const JobRequest& request,
                           std::span<const SourceFile> files, ModelPlan plan);

// kFileChanged naming the first file that is no longer what was opened.
Result<void> CheckAllUnchanged(std::span<const SourceFile> files);

}  // namespace modelcache
