// Walks the pickle of a torch checkpoint: names its tensors and keeps its structure as JSON.
#pragma once

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/pickle.h"
#include "server/loader/torch_tensor.h"

namespace modelcache {

// Adds the tensors of `document` to `plan` and sets its metadata: "structure", "opaque",
// "quantization". `resolve` adds storages to the same plan. Names are the path joined with ".";
// a second tensor of one name gets "#2".
// Errors: kBadFile (a cycle; nesting beyond 200 levels; what TensorRebuilder says), kUnsupported
// (the whole is one opaque object: the message proposes the Python path).
Result<void> PlanCheckpoint(const PickleDocument& document, const ResolveStorage& resolve,
                            ModelPlan& plan);

}  // namespace modelcache
