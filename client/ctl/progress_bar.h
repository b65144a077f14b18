// A progress bar on standard error while a model is loaded.
#pragma once

#include <string>

#include "common/clock.h"
#include "proto/messages.h"

namespace modelcache {

// One line of text: bar, percentage, bytes, speed and time left. `width` columns at most.
std::string ProgressLine(const ProgressEvent& event, double seconds, std::size_t width);

// Draws on standard error when that is a terminal, MODELCACHE_PROGRESS is not 0, and the load takes
// longer than a second. The line is wiped when the object dies.
class ProgressBar {
 public:
  ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();

  void Show(const ProgressEvent& event);

 private:
  bool enabled_;
  bool drawn_ = false;
  TimePoint started_;
};

}  // namespace modelcache
