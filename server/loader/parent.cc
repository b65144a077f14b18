// PR_SET_PDEATHSIG.
#include "server/loader/parent.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

namespace modelcache {

bool TieToParent() {
  // The parent may have died before prctl, hence the second look.
  const pid_t parent = ::getppid();
  return ::prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && ::getppid() == parent && parent != 0;
}

}  // namespace modelcache
