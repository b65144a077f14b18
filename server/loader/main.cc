// modelcached-loader: does one job that comes over descriptor 3 and exits.
//
// Exit status: 0 done, 1 the job failed (reported on the channel), 2 not started by a daemon.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "common/unique_fd.h"
#include "common/utf8.h"
#include "server/loader/job.h"
#include "server/loader/loader_channel.h"
#include "server/loader/parent.h"

namespace {

constexpr int kChannelDescriptor = 3;

bool IsSocket(int fd) {
  struct stat status = {};
  return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

// A loader reads nothing but its job and its files.
void DropStdin() {
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) {
    (void)::dup2(null, STDIN_FILENO);
    (void)::close(null);
  }
}

}  // namespace

int main() {
  if (!IsSocket(kChannelDescriptor)) {
    (void)std::fputs("modelcached-loader is started by modelcached, not by hand\n", stderr);
    return 2;
  }
  if (!modelcache::TieToParent()) {
    return 2;
  }
  DropStdin();
  (void)::fcntl(kChannelDescriptor, F_SETFD, FD_CLOEXEC);
  modelcache::LoaderChannel channel{modelcache::UniqueFd(kChannelDescriptor)};
  const auto done = modelcache::RunJob(channel);
  if (!done.ok()) {
    (void)std::fprintf(stderr, "modelcached-loader: %s\n",
                       modelcache::Printable(done.error().message).c_str());
  }
  return done.ok() ? 0 : 1;
}
