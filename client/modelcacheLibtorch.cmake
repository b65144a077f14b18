# For programs that use the installed package: finds the libtorch of a PyTorch installation without
# its own package config, which looks for a CUDA toolkit when the wheel was built for one.
#
# modelcache_find_libtorch(<asked>): makes the imported target modelcache::libtorch and sets
# MODELCACHE_LIBTORCH_ROOT, unless there is none; <asked> gets who was asked. In this order: the
# target `torch` of a find_package(Torch); TORCH_INSTALL_PREFIX, variable or environment; what a
# Python imports as torch. That Python is the one of MODELCACHE_PYTHON, variable or environment, and
# no other; without such a wish Python3_EXECUTABLE and python3.

function(_modelcache_libtorch_root out asked)
  set(${out} "" PARENT_SCOPE)
  foreach(root "${TORCH_INSTALL_PREFIX}" "$ENV{TORCH_INSTALL_PREFIX}")
    if(root AND EXISTS "${root}/lib/libtorch_cpu.so")
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(MODELCACHE_PYTHON)
    set(programs "${MODELCACHE_PYTHON}")
  elseif(NOT "$ENV{MODELCACHE_PYTHON}" STREQUAL "")
    set(programs "$ENV{MODELCACHE_PYTHON}")
  else()
    set(programs ${Python3_EXECUTABLE} python3)
  endif()
  string(REPLACE ";" ", " names "${programs}")
  set(${asked} "${names}" PARENT_SCOPE)
  foreach(program IN LISTS programs)
    # Where torch would be imported from; importing it would take seconds.
    execute_process(
      COMMAND "${program}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
    if(result EQUAL 0 AND root AND EXISTS "${root}/lib/libtorch_cpu.so")
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(modelcache_find_libtorch asked)
  if(TARGET modelcache::libtorch)
    return()
  endif()
  if(TARGET torch)
    add_library(modelcache::libtorch INTERFACE IMPORTED GLOBAL)
    set_target_properties(modelcache::libtorch PROPERTIES INTERFACE_LINK_LIBRARIES torch)
    return()
  endif()
  _modelcache_libtorch_root(root programs)
  set(${asked} "${programs}" PARENT_SCOPE)
  if(NOT root)
    return()
  endif()
  # The C++ ABI of the wheel: that of before GCC 5 until torch 2.6.
  set(abi 1)
  if(EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake")
    file(STRINGS "${root}/share/cmake/Torch/TorchConfig.cmake" line REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
    if(line MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
      set(abi 0)
    endif()
  endif()
  foreach(name c10 torch_cpu torch)
    add_library(modelcache::libtorch_${name} SHARED IMPORTED GLOBAL)
    set_target_properties(modelcache::libtorch_${name} PROPERTIES
      IMPORTED_LOCATION "${root}/lib/lib${name}.so" IMPORTED_SONAME "lib${name}.so")
  endforeach()
  add_library(modelcache::libtorch INTERFACE IMPORTED GLOBAL)
  set_target_properties(modelcache::libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${abi}"
    INTERFACE_LINK_LIBRARIES
      "modelcache::libtorch_torch_cpu;modelcache::libtorch_c10;modelcache::libtorch_torch")
  set(MODELCACHE_LIBTORCH_ROOT "${root}" PARENT_SCOPE)
endfunction()
