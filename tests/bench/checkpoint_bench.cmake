# Snapshots: staging, hashing, the local store's write paths, transfers.
find_package(benchmark REQUIRED)
add_executable(checkpoint_bench ${CMAKE_CURRENT_LIST_DIR}/checkpoint_bench.cc)
target_link_libraries(checkpoint_bench PRIVATE everstep_checkpoint benchmark::benchmark)
