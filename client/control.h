// Control requests by name with JSON in and out: what mc_call offers.
#pragma once

#include <string>

#include "client/core.h"
#include "common/result.h"

namespace modelcache {

// Sends the request `method` names ("list", "evict", …) with `argument`, a JSON object or empty,
// and returns the reply as JSON. modelcache.h has the table.
// Errors: kInvalidArgument (method or argument), those of Client::Control.
Result<std::string> CallControl(Client& client, const std::string& method,
                                const std::string& argument);

}  // namespace modelcache
