# The planner: published step times against predicted ones, time to plan, distance from exhaustive search.
add_executable(planner_bench ${CMAKE_CURRENT_LIST_DIR}/planner_bench.cc)
target_link_libraries(planner_bench PRIVATE everstep_planner)
