# libtorch as it lies in the torch package of MODELCACHE_PYTHON, CUDA wheels included.
#
# torch's own package files search for a CUDA toolkit when the wheel is a CUDA one; a loader for the
# CPU links three libraries by name instead.
#
# Gives: PythonTorch_FOUND, PythonTorch_ROOT, PythonTorch_VERSION and the target PythonTorch::torch
# (headers as system headers, an rpath to the package's lib folder).
if(NOT PythonTorch_ROOT OR NOT PythonTorch_PYTHON STREQUAL MODELCACHE_PYTHON)
  # Found without importing torch, which takes seconds.
  execute_process(
    COMMAND ${MODELCACHE_PYTHON} -c
      "import importlib.util as u, importlib.metadata as m, os; print(os.path.dirname(u.find_spec('torch').origin) + ';' + m.version('torch'))"
    OUTPUT_VARIABLE PythonTorch_answer OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE PythonTorch_result)
  if(PythonTorch_result EQUAL 0)
    list(GET PythonTorch_answer 0 PythonTorch_folder)
    list(GET PythonTorch_answer 1 PythonTorch_number)
    set(PythonTorch_ROOT ${PythonTorch_folder} CACHE PATH "Folder of the torch package" FORCE)
    set(PythonTorch_VERSION ${PythonTorch_number} CACHE STRING "Version of the torch package" FORCE)
    set(PythonTorch_PYTHON ${MODELCACHE_PYTHON} CACHE INTERNAL "Who was asked for PythonTorch_ROOT")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PythonTorch
  REQUIRED_VARS PythonTorch_ROOT
  VERSION_VAR PythonTorch_VERSION
  REASON_FAILURE_MESSAGE "${MODELCACHE_PYTHON} has no torch: set MODELCACHE_PYTHON, or MODELCACHE_TORCH=OFF")

if(PythonTorch_FOUND AND NOT TARGET PythonTorch::torch)
  add_library(PythonTorch::torch INTERFACE IMPORTED)
  target_include_directories(PythonTorch::torch SYSTEM INTERFACE
    ${PythonTorch_ROOT}/include ${PythonTorch_ROOT}/include/torch/csrc/api/include)
  target_link_libraries(PythonTorch::torch INTERFACE
    ${PythonTorch_ROOT}/lib/libtorch.so ${PythonTorch_ROOT}/lib/libtorch_cpu.so
    ${PythonTorch_ROOT}/lib/libc10.so)
endif()
