// Config: the command line and the configuration file, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/result.h"

namespace modelcache {

struct Config {
  std::string socket;  // empty: DefaultSocketPath(), or the one passed by the service manager
  std::uint64_t memory_budget_bytes = 0;
  std::uint64_t arena_max_bytes = 1U << 30U;
  std::string loader;  // path of modelcached-loader
  Duration load_timeout = std::chrono::minutes(30);
  std::size_t max_clients = 4096;
  std::string metrics;  // file that is rewritten with the metrics; empty: none
  std::string log_level = "info";
};

// What was asked for: either a config, or a text to print before ending with `exit_code`
// (--help and --version: 0, a usage error: 2).
struct ParsedConfig {
  std::optional<Config> config;
  std::string text;
  int exit_code = 0;
};

// `memory_bytes` is what percentages refer to.
ParsedConfig ParseConfig(int argc, const char* const* argv, std::uint64_t memory_bytes);

// "4096", "64KiB", "1.5GiB", "2G" (powers of 1024; kB, MB, GB are powers of 1000).
// Errors: kInvalidArgument.
Result<std::uint64_t> ParseSize(std::string_view text);

// A size, or "80%" of `memory_bytes`. Errors: kInvalidArgument.
Result<std::uint64_t> ParseBudget(std::string_view text, std::uint64_t memory_bytes);

// The smaller of the machine's memory and the memory limits of this process's control groups
// (version 2 and 1, parents included). `root` is "" but in tests; 0 when nothing is known.
std::uint64_t UsableMemoryBytes(const std::string& root);

// The loader beside the running program: same folder. Empty when that cannot be told.
std::string DefaultLoaderPath();

// Whether `path` is a program this process may run: the first cold load would be too late to learn
// it. Errors: kInvalidArgument naming the path.
Result<void> CheckLoader(const std::string& path);

}  // namespace modelcache
