// The jobs of a loader process.
#pragma once

#include <vector>

#include "common/result.h"
#include "common/unique_fd.h"
#include "server/loader/loader_channel.h"

namespace modelcache {

// Takes one job from the channel and does it to the end: a load is committed, a verification is
// reported. A failure is reported on the channel (kJobFailed) and returned; a failed collapse is
// silent and no failure. Errors: those of the job.
Result<void> RunJob(LoaderChannel& channel);

// Reads the files into new arenas and commits them.
Result<void> RunLoad(LoaderChannel& channel, const JobRequest& request,
                     std::vector<UniqueFd> files);

// Re-hashes the arenas against their manifest and compares them with the files, byte by byte,
// without a second copy in memory. The files are opened by their recorded paths where the job did
// not bring them.
Result<VerifiedEvent> RunVerify(const JobRequest& request, std::vector<UniqueFd> files,
                                const std::vector<UniqueFd>& arenas);

// Backs the large storages of the arenas with huge pages, where the kernel can. Only whole 2 MiB
// blocks inside a storage: a block with a hole in it would be filled and cost memory. In small
// steps, so that the process can be killed at once, and at the lowest priority.
void RunCollapse(const std::vector<UniqueFd>& arenas);

}  // namespace modelcache
