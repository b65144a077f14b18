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
