# Host collectives beside Gloo, which is optional and used here only.
add_executable(collective_bench ${CMAKE_CURRENT_LIST_DIR}/collective_bench.cc)
target_link_libraries(collective_bench PRIVATE everstep_collective)
find_package(Gloo CONFIG QUIET)
if(Gloo_FOUND)
  target_compile_definitions(collective_bench PRIVATE EVERSTEP_BENCH_GLOO)
  target_link_libraries(collective_bench PRIVATE gloo Threads::Threads)
endif()
