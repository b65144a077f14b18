// The exposition text.
#include "server/metrics.h"

#include <array>
#include <cstdio>
#include <string_view>

namespace modelcache {
namespace {

struct Family {
  std::string_view name;  // without the prefix
  std::string_view type;
  std::string_view help;
};

void Header(std::string& text, const Family& family) {
  text.append("# HELP modelcache_").append(family.name).append(" ").append(family.help);
  text.append("\n# TYPE modelcache_").append(family.name).append(" ").append(family.type);
  text.append("\n");
}

void Sample(std::string& text, const Family& family, std::uint64_t value) {
  Header(text, family);
  text.append("modelcache_").append(family.name).append(" ").append(std::to_string(value));
  text.append("\n");
}

void SampleSeconds(std::string& text, const Family& family, double value) {
  std::array<char, 32> number{};
  (void)std::snprintf(number.data(), number.size(), "%.6f", value);
  Header(text, family);
  text.append("modelcache_").append(family.name).append(" ").append(number.data()).append("\n");
}

}  // namespace

std::string FormatMetrics(const StatusReply& status, const CatalogCounters& catalog,
                          const JobCounters& jobs, std::uint64_t closing_bytes) {
  std::string text;
  Sample(text, {"memory_budget_bytes", "gauge", "Kernel memory arenas may hold."},
         status.memory_budget_bytes);
  Sample(text, {"resident_bytes", "gauge", "Kernel memory arenas hold."}, status.resident_bytes);
  Sample(text, {"reserved_bytes", "gauge", "Promised to loads in progress."},
         status.reserved_bytes);
  Sample(text, {"closing_bytes", "gauge", "Of arenas on their way out."}, closing_bytes);
  Sample(text, {"arena_bytes", "gauge", "Bytes of all storages, shared ones once."},
         status.arena_bytes);
  Sample(text, {"models", "gauge", "Resident models."}, status.entries);
  Sample(text, {"loading", "gauge", "Loads in progress."}, status.loading);
  Sample(text, {"leases", "gauge", "Uses of models by clients."}, status.leases);
  Sample(text, {"clients", "gauge", "Connected clients."}, status.clients);
  Sample(text, {"hits_total", "counter", "Opens that found their model."}, status.hits);
  const Family misses{"misses_total", "counter", "Opens that did not, by reason."};
  Header(text, misses);
  for (std::size_t i = 0; i < kMissKindCount; ++i) {
    text.append("modelcache_misses_total{reason=\"");
    text.append(MissKindName(static_cast<MissKind>(i))).append("\"} ");
    text.append(std::to_string(catalog.misses.at(i))).append("\n");
  }
  Sample(text, {"loads_total", "counter", "Cold loads that succeeded."}, jobs.loads);
  Sample(text, {"load_failures_total", "counter", "Cold loads that failed."}, jobs.failed_loads);
  Sample(text, {"load_cancellations_total", "counter", "Cold loads nobody waited for."},
         jobs.cancelled_loads);
  SampleSeconds(text, {"load_seconds_total", "counter", "Time spent in loads that succeeded."},
                jobs.load_seconds);
  Sample(text, {"evictions_total", "counter", "Models evicted."}, catalog.evictions);
  Sample(text, {"evicted_bytes_total", "counter", "Kernel memory evictions freed."},
         catalog.evicted_bytes);
  SampleSeconds(text, {"uptime_seconds", "gauge", "Since the daemon started."},
                status.uptime_seconds);
  return text;
}

}  // namespace modelcache
