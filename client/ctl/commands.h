// The commands of modelcachectl, after its command line has been read.
#pragma once

#include <string>
#include <vector>

#include "client/core.h"
#include "common/result.h"

namespace modelcache {

struct CommandLine {
  std::string command;
  std::string socket_path;
  bool json = false;
  bool wide = false;               // list
  std::vector<std::string> paths;  // load
  std::string model;               // show, evict, pin, unpin, why, verify
  std::string name;
  std::string format = "auto";
  std::string device = "cpu";
  bool pin = false;
  double timeout_seconds = 0;
};

inline constexpr int kExitDone = 0;
inline constexpr int kExitRefused = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNoDaemon = 3;

// Runs one command: the answer goes to standard output, a failure to standard error (and, with
// --json, as an object to standard output). Returns the exit code.
int RunCommand(const CommandLine& line);

}  // namespace modelcache
