# Tests of the daemon's logic and edges.
modelcache_test(server_logic_test LABEL unit
  SOURCES
    calls_test.cc catalog_test.cc dispatcher_memory_test.cc dispatcher_test.cc dispatcher_waiting_test.cc
    metrics_test.cc planner_test.cc
  LIBS modelcache_server)

# A loader that does what the file it is given says, so that tests need no real one.
add_executable(modelcache_fake_loader ${CMAKE_SOURCE_DIR}/tests/support/fake_loader.cc)
modelcache_target(modelcache_fake_loader)
target_link_libraries(modelcache_fake_loader PRIVATE modelcache_proto)

foreach(name edges daemon)
  modelcache_test(server_${name}_test LABEL unit SOURCES ${name}_test.cc LIBS modelcache_server)
  target_compile_definitions(server_${name}_test PRIVATE
    MODELCACHE_DAEMON="$<TARGET_FILE:modelcached>"
    MODELCACHE_FAKE_LOADER="$<TARGET_FILE:modelcache_fake_loader>")
  add_dependencies(server_${name}_test modelcached modelcache_fake_loader)
endforeach()
