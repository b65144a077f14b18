// CLI11 options, sizes, memory limits.
#include "server/config.h"

#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>
#include <utility>

#include "common/socket_folder.h"
#include "proto/version.h"

namespace modelcache {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};
constexpr double kKi = 1024.0;
constexpr double kKilo = 1000.0;
constexpr std::array<Unit, 14> kUnits{{
    {"", 1},
    {"B", 1},
    {"K", kKi},
    {"KiB", kKi},
    {"kB", kKilo},
    {"M", kKi* kKi},
    {"MiB", kKi* kKi},
    {"MB", kKilo* kKilo},
    {"G", kKi* kKi* kKi},
    {"GiB", kKi* kKi* kKi},
    {"GB", kKilo* kKilo* kKilo},
    {"T", kKi* kKi* kKi* kKi},
    {"TiB", kKi* kKi* kKi* kKi},
    {"TB", kKilo* kKilo* kKilo* kKilo},
}};
constexpr double kLargestSize = 9.0e18;  // fits in 63 bits

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

// A non-negative decimal number and what follows it.
std::optional<std::pair<double, std::string_view>> SplitNumber(std::string_view text) {
  double number = 0;
  auto [end, failed] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (failed != std::errc() || !std::isfinite(number) || number < 0) {
    return std::nullopt;
  }
  std::string_view rest = text.substr(static_cast<std::size_t>(end - text.data()));
  while (rest.starts_with(' ')) {
    rest.remove_prefix(1);
  }
  return std::pair(number, rest);
}

std::uint64_t MachineMemoryBytes(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  while (file >> name >> kib) {
    if (name == "MemTotal:") {
      return kib * 1024U;
    }
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

std::uint64_t ReadLimit(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t bytes = 0;
  // "max", and on version 1 a number near 2^63, mean no limit.
  return file >> bytes ? bytes : std::numeric_limits<std::uint64_t>::max();
}

// The smallest limit of a group and its parents.
std::uint64_t LimitUpwards(const std::string& base, std::string group, const std::string& file) {
  std::uint64_t limit = ReadLimit(base + "/" + file);
  while (!group.empty() && group != "/") {
    std::string path = base;
    path.append(group).append("/").append(file);
    limit = std::min(limit, ReadLimit(path));
    group.erase(group.rfind('/'));
  }
  return limit;
}

std::uint64_t GroupLimitBytes(const std::string& root) {
  std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos || line[second + 1] != '/') {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      limit = std::min(limit, LimitUpwards(root + "/sys/fs/cgroup", group, "memory.max"));
    } else if (controllers == "memory") {
      limit = std::min(
          limit, LimitUpwards(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

struct RawOptions {
  std::string budget = "80%";
  std::string arena_max = "1GiB";
  double load_timeout_seconds = 1800;
};

void AddOptions(CLI::App& app, Config& config, RawOptions& raw) {
  app.set_version_flag("--version", std::string("modelcached ") + kProductVersion);
  app.set_config("--config", "", "Read options from this file (INI or TOML)");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_option("--socket", config.socket, "Path of the socket");
  app.add_option("--memory-budget", raw.budget,
                 "Memory arenas may hold: a size (64GiB) or a share of what is usable (80%)")
      ->capture_default_str();
  app.add_option("--arena-max", raw.arena_max, "Largest arena that holds several storages")
      ->capture_default_str();
  app.add_option("--loader", config.loader, "Path of modelcached-loader");
  app.add_option("--load-timeout", raw.load_timeout_seconds, "Seconds a cold load may take")
      ->capture_default_str();
  app.add_option("--max-clients", config.max_clients, "Connections served at once")
      ->capture_default_str();
  app.add_option("--metrics", config.metrics,
                 "Keep the metrics in this file (Prometheus text format)");
  app.add_option("--log-level", config.log_level, "trace, debug, info, warn, error or off")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
}

Result<void> Check(const RawOptions& raw, std::uint64_t memory_bytes, Config& config) {
  Result<std::uint64_t> budget = ParseBudget(raw.budget, memory_bytes);
  if (!budget.ok()) {
    return Invalid("--memory-budget: " + budget.error().message);
  }
  Result<std::uint64_t> arena_max = ParseSize(raw.arena_max);
  if (!arena_max.ok()) {
    return Invalid("--arena-max: " + arena_max.error().message);
  }
  constexpr std::uint64_t kSmallestArena = 4U << 20U;
  if (*arena_max < kSmallestArena) {
    return Invalid("--arena-max: " + raw.arena_max + " is below the least, 4MiB");
  }
  constexpr double kLongestSeconds = 10.0 * 365 * 24 * 3600;
  if (!(raw.load_timeout_seconds > 0) || raw.load_timeout_seconds > kLongestSeconds) {
    return Invalid("--load-timeout: not between 0 and 10 years");
  }
  if (config.max_clients == 0) {
    return Invalid("--max-clients: must be at least 1");
  }
  config.memory_budget_bytes = *budget;
  config.arena_max_bytes = *arena_max;
  config.load_timeout = std::chrono::milliseconds(
      static_cast<std::int64_t>(std::ceil(raw.load_timeout_seconds * kKilo)));
  return {};
}

}  // namespace

Result<std::uint64_t> ParseSize(std::string_view text) {
  auto split = SplitNumber(text);
  if (!split) {
    return Invalid("'" + std::string(text) + "' is not a size");
  }
  const auto* unit = std::find_if(kUnits.begin(), kUnits.end(), [&](const Unit& candidate) {
    return candidate.name == split->second;
  });
  if (unit == kUnits.end()) {
    return Invalid("'" + std::string(text) + "' has an unknown unit");
  }
  const double bytes = split->first * unit->factor;
  if (bytes > kLargestSize) {
    return Invalid("'" + std::string(text) + "' is too large");
  }
  return static_cast<std::uint64_t>(bytes);
}

Result<std::uint64_t> ParseBudget(std::string_view text, std::uint64_t memory_bytes) {
  auto split = SplitNumber(text);
  if (!split || split->second != "%") {
    return ParseSize(text);
  }
  if (split->first <= 0 || split->first > 100) {
    return Invalid("'" + std::string(text) + "' is not between 0% and 100%");
  }
  if (memory_bytes == 0) {
    return Invalid("the machine's memory is unknown; give a size instead of a share");
  }
  return static_cast<std::uint64_t>(static_cast<double>(memory_bytes) * split->first / 100);
}

std::uint64_t UsableMemoryBytes(const std::string& root) {
  return std::min(MachineMemoryBytes(root), GroupLimitBytes(root));
}

std::string DefaultLoaderPath() {
  std::array<char, 4096> path{};
  const ssize_t got = ::readlink("/proc/self/exe", path.data(), path.size());
  if (got <= 0 || static_cast<std::size_t>(got) == path.size()) {
    return {};
  }
  const std::string program(path.data(), static_cast<std::size_t>(got));
  return FolderOf(program) + "/modelcached-loader";
}

Result<void> CheckLoader(const std::string& path) {
  struct stat status = {};
  std::string why;
  if (::stat(path.c_str(), &status) != 0) {
    why = std::generic_category().message(errno);
  } else if (!S_ISREG(status.st_mode)) {
    why = "not a regular file";
  } else if (::access(path.c_str(), X_OK) != 0) {
    why = "not executable by this user";
  } else {
    return {};
  }
  return Invalid("--loader: " + path + ": " + why);
}

ParsedConfig ParseConfig(int argc, const char* const* argv, std::uint64_t memory_bytes) {
  ParsedConfig parsed;
  Config config;
  RawOptions raw;
  CLI::App app("modelcached: loads a model once; every later load maps the same memory");
  AddOptions(app, config, raw);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const bool asked = app.exit(error, text, text) == 0;
    parsed.text = text.str();
    parsed.exit_code = asked ? 0 : 2;
    return parsed;
  }
  if (auto checked = Check(raw, memory_bytes, config); !checked.ok()) {
    parsed.text = checked.error().message + "\n";
    parsed.exit_code = 2;
    return parsed;
  }
  if (config.loader.empty()) {
    config.loader = DefaultLoaderPath();
  }
  parsed.config = std::move(config);
  return parsed;
}

}  // namespace modelcache
