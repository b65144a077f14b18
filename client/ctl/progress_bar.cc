// Drawing of the progress bar.
#include "client/ctl/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "client/ctl/text.h"

namespace modelcache {
namespace {

constexpr auto kFirstShown = std::chrono::seconds(1);
constexpr std::size_t kBarWidth = 30;

bool Wanted() {
  const char* told = std::getenv("MODELCACHE_PROGRESS");
  return ::isatty(STDERR_FILENO) == 1 && (told == nullptr || std::string_view(told) != "0");
}

std::size_t TerminalWidth() {
  winsize size = {};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string ProgressLine(const ProgressEvent& event, double seconds, std::size_t width) {
  const auto done = static_cast<double>(event.done_bytes);
  const auto total = static_cast<double>(event.total_bytes);
  const double speed = seconds > 0 ? done / seconds : 0;
  std::string line = "loading ";
  if (event.total_bytes > 0) {
    const double share = std::min(done / total, 1.0);
    const auto filled = static_cast<std::size_t>(share * kBarWidth);
    line += "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] " +
            std::to_string(static_cast<int>(share * 100)) + "%  " + HumanBytes(event.done_bytes) +
            " of " + HumanBytes(event.total_bytes);
  } else {
    line += HumanBytes(event.done_bytes);
  }
  if (speed > 0) {
    line += "  " + HumanBytes(static_cast<std::uint64_t>(speed)) + "/s";
    if (total > done) {
      line += "  " + HumanSeconds((total - done) / speed) + " left";
    }
  }
  return line.substr(0, width);
}

ProgressBar::ProgressBar() : enabled_(Wanted()), started_(std::chrono::steady_clock::now()) {}

ProgressBar::~ProgressBar() {
  if (drawn_) {
    (void)std::fputs("\r\033[K", stderr);
  }
}

void ProgressBar::Show(const ProgressEvent& event) {
  const auto passed = std::chrono::steady_clock::now() - started_;
  if (!enabled_ || passed < kFirstShown) {
    return;
  }
  const double seconds = Seconds(passed);
  const std::string line = ProgressLine(event, seconds, TerminalWidth() - 1);
  (void)std::fprintf(stderr, "\r%s\033[K", line.c_str());
  (void)std::fflush(stderr);
  drawn_ = true;
}

}  // namespace modelcache
