// The names no model file has a reason to mention. A list of what is refused, not of what is
// allowed: nothing is ever called, so an unknown name is only an opaque value.
#include <algorithm>
#include <array>

#include "server/loader/pickle.h"

namespace modelcache {
namespace {

// Whole modules, with everything below them.
constexpr std::array<std::string_view, 54> kModules = {"os",
                                                       "posix",
                                                       "nt",
                                                       "posixpath",
                                                       "ntpath",
                                                       "subprocess",
                                                       "_posixsubprocess",
                                                       "sys",
                                                       "importlib",
                                                       "imp",
                                                       "runpy",
                                                       "shutil",
                                                       "socket",
                                                       "_socket",
                                                       "ssl",
                                                       "ctypes",
                                                       "_ctypes",
                                                       "pickle",
                                                       "_pickle",
                                                       "cPickle",
                                                       "dill",
                                                       "cloudpickle",
                                                       "joblib",
                                                       "marshal",
                                                       "webbrowser",
                                                       "pty",
                                                       "code",
                                                       "codeop",
                                                       "pdb",
                                                       "bdb",
                                                       "cProfile",
                                                       "profile",
                                                       "timeit",
                                                       "trace",
                                                       "doctest",
                                                       "commands",
                                                       "popen2",
                                                       "asyncio",
                                                       "multiprocessing",
                                                       "signal",
                                                       "tempfile",
                                                       "http",
                                                       "urllib",
                                                       "urllib2",
                                                       "requests",
                                                       "httpx",
                                                       "aiohttp",
                                                       "ftplib",
                                                       "smtplib",
                                                       "telnetlib",
                                                       "pip",
                                                       "pkgutil",
                                                       "pydoc",
                                                       "torch.hub"};

// Single names.
constexpr std::array<std::string_view, 38> kNames = {"builtins.eval",
                                                     "builtins.exec",
                                                     "builtins.compile",
                                                     "builtins.__import__",
                                                     "builtins.getattr",
                                                     "builtins.setattr",
                                                     "builtins.delattr",
                                                     "builtins.open",
                                                     "builtins.input",
                                                     "builtins.globals",
                                                     "builtins.locals",
                                                     "builtins.vars",
                                                     "builtins.breakpoint",
                                                     "builtins.execfile",
                                                     "builtins.apply",
                                                     "builtins.memoryview",
                                                     "builtins.map",
                                                     "builtins.filter",
                                                     "io.open",
                                                     "io.FileIO",
                                                     "_io.open",
                                                     "_io.FileIO",
                                                     "codecs.open",
                                                     "operator.attrgetter",
                                                     "operator.methodcaller",
                                                     "operator.itemgetter",
                                                     "_operator.attrgetter",
                                                     "_operator.methodcaller",
                                                     "functools.partial",
                                                     "functools.reduce",
                                                     "types.FunctionType",
                                                     "types.CodeType",
                                                     "torch.load",
                                                     "torch.serialization.load",
                                                     "torch.jit.load",
                                                     "torch.compile",
                                                     "numpy.load",
                                                     "torch.utils.cpp_extension.load"};

bool IsInside(std::string_view module, std::string_view parent) {
  return module == parent ||
         (module.size() > parent.size() && module.compare(0, parent.size(), parent) == 0 &&
          module[parent.size()] == '.');
}

}  // namespace

bool RunsCode(std::string_view module, std::string_view name) {
  if (module == "__builtin__") {
    module = "builtins";
  }
  if (std::any_of(kModules.begin(), kModules.end(),
                  [&](std::string_view parent) { return IsInside(module, parent); })) {
    return true;
  }
  // STACK_GLOBAL may reach further with dots in the name: the start decides.
  const std::string full = std::string(module) + "." + std::string(name);
  return std::any_of(kNames.begin(), kNames.end(),
                     [&](std::string_view refused) { return IsInside(full, refused); }) ||
         std::any_of(kModules.begin(), kModules.end(),
                     [&](std::string_view parent) { return IsInside(full, parent); });
}

}  // namespace modelcache
