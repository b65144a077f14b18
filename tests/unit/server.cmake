# Tests of the daemon's logic and edges.
modelcache_test(server_logic_test LABEL unit
  SOURCES catalog_test.cc dispatcher_test.cc planner_test.cc
  LIBS modelcache_server)
