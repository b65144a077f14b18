// Tensors of a model as DLPack structs, all of them at once.
#pragma once

#include "client/include/modelcache/modelcache.h"

namespace modelcache {

// What mc_model_dlpack does once its arguments are checked: `tables` are those of `model`, `out`
// has room for every tensor. Throws std::bad_alloc, and then owns nothing.
void MakeDlpack(mc_model* model, const mc_tables& tables, void** out);

}  // namespace modelcache
