# The rank library: its cost per step, and a snapshot into staging.
add_executable(session_bench ${CMAKE_CURRENT_LIST_DIR}/session_bench.cc)
target_link_libraries(session_bench PRIVATE everstep_client)
