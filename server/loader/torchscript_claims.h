// What the pickles of a TorchScript archive claim about its records.
#pragma once

#include <span>

#include "common/result.h"
#include "server/loader/zip_directory.h"

namespace modelcache {

// libtorch believes the element counts of data.pkl and constants.pkl, and some functions read
// tensors while it loads. Checks that each record has what they claim, before libtorch sees it.
// Errors: kBadFile naming the record, needed and present bytes; what ReadPickle and ReadStorageId
// say; kFileChanged, kSystem.
Result<void> CheckTorchscriptClaims(std::span<const SourceFile> files, std::size_t file,
                                    const ZipDirectory& directory);

}  // namespace modelcache
