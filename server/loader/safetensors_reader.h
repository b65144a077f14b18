// The safetensors format: 8 bytes header length, a JSON header, the bytes of the tensors.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// True when the first bytes of a file of `size_bytes` can only be meant as safetensors: a length
// that fits the file, or any length and then '{'.
bool LooksLikeSafetensors(std::string_view first_bytes, std::uint64_t size_bytes);

// Validates the whole header as the reference implementation does (names once, ranges that follow
// each other without hole or overlap and cover the file) before any tensor exists. Each tensor is a
// storage of its own, in the order of the bytes.
// Errors: kBadFile, kUnsupported (an odd last dimension of F4), kFileChanged, kSystem.
Result<ModelPlan> ReadSafetensors(std::span<const SourceFile> files, std::size_t file);

}  // namespace modelcache
