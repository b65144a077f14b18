#!/bin/sh
# Installs the build to a folder of its own, builds docs/examples/cpp against that as an outside
# project, and runs it on files of every kind; the installed Python package and the ways to say which
# libtorch. Usage: installed_example.sh BUILD EXAMPLE PYTHON CMAKE
set -eu
unset MODELCACHE_LIBRARY MODELCACHE_PYTHON TORCH_INSTALL_PREFIX PYTHONPATH || true
build=$1 example=$2 python=$3 cmake=$4
root=$(mktemp -d)
mkdir -m 700 "$root/run" # a folder that was named is never made
export MODELCACHE_SOCKET="$root/run/socket"
unset MODELCACHE_DAEMON MODELCACHE_AUTOSTART || true
ctl="$root/prefix/bin/modelcachectl"
finish() {
  code=$?
  "$ctl" shutdown >/dev/null 2>&1 || true
  [ "$code" = 0 ] || { echo "--- daemon's log"; cat "$root/run/log" 2>/dev/null || true; }
  rm -rf "$root"
  exit "$code"
}
trap finish EXIT

"$cmake" --install "$build" --prefix "$root/prefix" >/dev/null
[ -e "$root/prefix/share/doc/modelcached/docs/examples/cpp/show_model.cc" ] ||
  { echo "the README's examples are not installed with it"; exit 1; }
MODELCACHE_PYTHON="$python" "$cmake" -S "$example" -B "$root/build" -DCMAKE_PREFIX_PATH="$root/prefix" \
  -DCMAKE_BUILD_TYPE=Debug >"$root/configure.log" || { cat "$root/configure.log"; exit 1; }
"$cmake" --build "$root/build" -j 2 >"$root/build.log" || { cat "$root/build.log"; exit 1; }

"$python" -W ignore - "$root" <<'PYTHON'
import sys, torch
from safetensors.torch import save_file
root = sys.argv[1]
shared = torch.arange(12.0)
save_file({"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(4, dtype=torch.bfloat16)}, f"{root}/m.safetensors")
torch.save({"view": shared[2:8].view(2, 3).t(), "all": shared, "q": torch.quantize_per_tensor(torch.ones(3), 0.5, 3, torch.qint8),
            "conj": torch.ones(2, dtype=torch.complex64).conj(), "grad": torch.nn.Parameter(torch.ones(2))}, f"{root}/m.pt")
class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.ones_(self.a.weight)
        self.b.weight = self.a.weight
        self.register_buffer("k", torch.arange(3.0))
    def forward(self, x):
        return self.a(x) + self.b(x) + self.k
torch.jit.save(torch.jit.trace(Module(), torch.ones(1, 3)), f"{root}/ts.pt", _extra_files={"info.txt": "hello"})
PYTHON

# expect TEXT COMMAND…: the output of the command has the text.
expect() {
  text=$1
  shift
  output=$("$@" 2>&1) || { echo "failed: $*"; echo "$output"; exit 1; }
  case $output in
    *"$text"*) ;;
    *) echo "no '$text' in the output of $*:"; echo "$output"; exit 1 ;;
  esac
}

# refused TEXT COMMAND…: the command fails and its output, on one line, has the text.
refused() {
  text=$1
  shift
  if output=$("$@" 2>&1); then echo "succeeded: $*"; exit 1; fi
  case $(echo $output) in
    *"$text"*) ;;
    *) echo "no '$text' in the output of $*:"; echo "$output"; exit 1 ;;
  esac
}

# configure PACKAGE OPTION…: a project that asks for `PACKAGE` only and says whether it got torch.
configure() {
  rm -rf "$root/asks"
  mkdir "$root/asks"
  cat >"$root/asks/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.18)
project(asks LANGUAGES CXX)
find_package($1)
if(NOT TARGET modelcache::client)
  message(FATAL_ERROR "no modelcache::client")
endif()
if(TARGET modelcache::torch)
  message(STATUS "with torch")
else()
  message(STATUS "without torch")
endif()
CMAKE
  shift
  "$cmake" -S "$root/asks" -B "$root/asks/build" -DCMAKE_PREFIX_PATH="$root/prefix" "$@"
}

# A Python without torch, and a wish that is not overruled by another Python that has it.
printf '#!/bin/sh\nexit 0\n' >"$root/bare-python"
chmod +x "$root/bare-python"
without=-DMODELCACHE_PYTHON=$root/bare-python
expect "with torch" configure "modelcache REQUIRED" -DMODELCACHE_PYTHON="$python"
expect "without torch" configure "modelcache REQUIRED" "$without"
expect "without torch" configure "modelcache REQUIRED OPTIONAL_COMPONENTS torch" "$without"
refused "(asked: $root/bare-python). Name a Python that has torch with -DMODELCACHE_PYTHON=" \
  configure "modelcache REQUIRED COMPONENTS torch" "$without"

PYTHONPATH=$(dirname "$(dirname "$(find "$root/prefix" -path '*/modelcache/_ffi.py')")")
export PYTHONPATH
expect "($root/prefix/lib" "$python" -m modelcache --version
expect "float32" "$python" -W ignore -c "import modelcache; print(modelcache.open('$root/m.pt')['all'].dtype)"
unset PYTHONPATH

expect "miss" "$root/build/show_model" "$root/m.safetensors"
expect "hit" "$root/build/show_model" "$root/m.safetensors"
expect "weight CPUFloatType [2, 3] sum 15" "$root/build/show_model" "$root/m.safetensors"
expect "half CPUBFloat16Type [4] sum 4" "$root/build/show_model" "$root/m.safetensors"
expect "weight float32 [ 2 3 ]" "$root/build/raw_tensors" "$root/m.safetensors"
expect "view CPUFloatType [3, 2] sum 27" "$root/build/show_model" "$root/m.pt"
expect "q QuantizedCPUQInt8Type [3]" "$root/build/show_model" "$root/m.pt"
expect "extra file info.txt: hello" "$root/build/run_module" "$root/ts.pt" 3
expect "output sum 21" "$root/build/run_module" "$root/ts.pt" 3
expect "c_test: all passed" "$build/bin/c_test" "$root/m.pt"
expect "ok" "$ctl" verify "$root/m.pt"
expect '"weight"' "$ctl" --json show "$root/m.safetensors"
echo "installed_example: all passed"
