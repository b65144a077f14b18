# Warnings, sanitizers and include path for every target of the project.

# modelcache_target(<target>): REQUIRES an existing target.
function(modelcache_target target)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wconversion -Wshadow>)
  if(MODELCACHE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(MODELCACHE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MODELCACHE_SANITIZE}
      -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${MODELCACHE_SANITIZE})
  endif()
endfunction()

# modelcache_private_library(<target> <exports>): a shared library that exports what the version
# script names and nothing else.
function(modelcache_private_library target exports)
  target_link_options(${target} PRIVATE
    -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL)
  if(NOT MODELCACHE_SANITIZE)
    # A library that a Python process of any origin loads brings its own C++ runtime.
    target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,-z,defs
      -Wl,-z,now -Wl,--gc-sections)
  endif()
endfunction()
