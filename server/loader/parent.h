// A loader's tie to the process that started it.
#pragma once

namespace modelcache {

// The parent's death ends this process from now on: nobody else would take what it makes. False
// when the parent has died already, or the kernel refuses.
bool TieToParent();

}  // namespace modelcache
