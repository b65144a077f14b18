// Checks the sum that a zip archive keeps of each record, for readers that go by it.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"
#include "server/loader/model_plan.h"

namespace modelcache {

// CRC-32 of `bytes`, as zip archives have it.
std::uint32_t CrcOf(std::span<const std::byte> bytes);

// Compares PlannedStorage::crc with the sums of the storage's digest leaves, in order.
// Errors: kBadFile with both sums. REQUIRES that the storage has a crc.
Result<void> CheckCrc(std::span<const SourceFile> files, const PlannedStorage& storage,
                      std::span<const std::uint32_t> leaves);

}  // namespace modelcache
