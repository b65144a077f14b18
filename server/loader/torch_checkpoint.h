// Walks the pickle of a torch checkpoint: names its tensors and keeps its structure as JSON.
#pragma once

#include <span>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/pickle.h"
#include "server/loader/torch_tensor.h"

namespace modelcache {

// Adds the tensors of `document` to `plan` and sets its metadata: "structure", "opaque",
// "quantization". `resolve` adds storages of `files` to the same plan, which had none; those that
// no tensor uses are dropped at the end. Names are the path joined with "."; a second tensor of one
// name gets "#2".
// Errors: kBadFile (a cycle; nesting beyond 200 levels; more copies than ByteBudget allows; what
// TensorRebuilder and ReadNumbers say), kUnsupported (the whole is one opaque object: the message
// proposes the Python path), kFileChanged, kSystem.
Result<void> PlanCheckpoint(const PickleDocument& document, std::span<const SourceFile> files,
                            const ResolveStorage& resolve, ModelPlan& plan);

}  // namespace modelcache
