// Metrics in the Prometheus text exposition format 0.0.4.
#pragma once

#include <cstdint>
#include <string>

#include "proto/messages.h"
#include "server/catalog.h"
#include "server/jobs.h"

namespace modelcache {

// Pure. Every sample has HELP and TYPE lines; names start with "modelcache_".
std::string FormatMetrics(const StatusReply& status, const CatalogCounters& catalog,
                          const JobCounters& jobs, std::uint64_t closing_bytes);

}  // namespace modelcache
