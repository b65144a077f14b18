// Starting a daemon for this user when none answers.
#pragma once

#include <string>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"

namespace modelcache {

// The daemon program: `told` when not empty, else $MODELCACHE_DAEMON, else ../bin/modelcached seen
// from this library, else the first one on $PATH. Errors: kNotFound with the places looked at.
Result<std::string> FindDaemonProgram(const std::string& told);

// A daemon this process started. It belongs to init, lives in a session of its own and holds no
// descriptor of this process.
struct StartedDaemon {
  UniqueFd process;      // pidfd, readable once it has exited; invalid where the kernel has none
  std::string log_path;  // its standard error; empty when that goes nowhere
};

// Starts `program` for the socket. Errors: kNotFound, kPermission (the program), kSystem.
Result<StartedDaemon> StartDaemon(const std::string& program, const std::string& socket_path);

// Lets one of many processes that want to start a daemon do it. Holds a lock file beside the
// socket; the kernel frees it when its holder dies.
class StartLock {
 public:
  explicit StartLock(const std::string& socket_path) : path_(socket_path + ".start") {}

  // True when this process holds the lock now, or when there can be no lock file. Does not wait.
  bool TryTake();

 private:
  std::string path_;
  UniqueFd file_;
  bool held_ = false;
};

// The last line of a log file, for an error message, its last 4 KiB at most; empty when there is
// none.
std::string LastLogLine(const std::string& path);

}  // namespace modelcache
