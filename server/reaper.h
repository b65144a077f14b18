// Reaper: closes big memfds on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "common/ids.h"
#include "common/unique_fd.h"

namespace modelcache {

// Closing the last descriptor of a filled memfd frees its pages, which takes tens of milliseconds
// per gigabyte: too long for the event loop. `closed` is called on the reaper's thread after each
// close. Close() may be called from any thread. The destructor closes what is left and joins.
class Reaper {
 public:
  explicit Reaper(std::function<void(ArenaId)> closed);
  ~Reaper();
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  void Close(const ArenaId& id, UniqueFd fd);

 private:
  void Run();

  std::function<void(ArenaId)> closed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<ArenaId, UniqueFd>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace modelcache
