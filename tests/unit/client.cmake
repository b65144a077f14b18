# Tests of client/: the core, the command-line tool's texts, and the shared library. The sources are
# named in full so that a build of the client alone may include this file.
if(NOT TARGET modelcache_test_peer)
  add_library(modelcache_test_peer STATIC
    ${CMAKE_CURRENT_LIST_DIR}/../support/arena_builder.cc
    ${CMAKE_CURRENT_LIST_DIR}/../support/fake_daemon.cc)
  modelcache_target(modelcache_test_peer)
  target_link_libraries(modelcache_test_peer PUBLIC modelcache_proto Threads::Threads)
endif()

modelcache_test(client_test LABEL unit
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/attach_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/autostart_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/client_cancel_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/client_connect_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/client_threads_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/core_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/description_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/model_files_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/written_pages_test.cc
  LIBS modelcache_client_core modelcache_test_peer)
modelcache_test(ctl_test LABEL unit
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/ctl_test.cc
  LIBS modelcache_ctl)
modelcache_test(client_api_test LABEL unit
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/client_api_test.cc ${CMAKE_CURRENT_LIST_DIR}/knapsack_c_test.cc ${CMAKE_CURRENT_LIST_DIR}/dlpack_test.cc
  LIBS modelcache_client modelcache_test_peer ${CMAKE_DL_LIBS})
if(TARGET modelcache::torch)
  modelcache_test(torch_header_test LABEL torch
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/torch_header_test.cc
    LIBS modelcache::torch modelcache_test_peer)
endif()
