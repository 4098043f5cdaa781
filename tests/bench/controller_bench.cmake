# The controller under thousands of emulated agents; needs everstep-controller beside it.
add_executable(controller_bench ${CMAKE_CURRENT_LIST_DIR}/controller_bench.cc)
target_link_libraries(controller_bench PRIVATE everstep_convert everstep_grpc everstep_heartbeat_codec Threads::Threads)
add_dependencies(controller_bench everstep-controller)
