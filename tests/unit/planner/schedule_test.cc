// Schedules: the known table of re-routing, and the recurrence and closed form of 1F1B against the event simulation.
#include "controller/core/planner/schedule.h"

#include <functional>
#include <numeric>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep::planner {
namespace {

struct OracleRow {
  int32_t stages, pipelines, micro_batches;
  std::vector<std::pair<int32_t, int32_t>> failed;
  double healthy, coupled, split, split_twice;
};
const OracleRow kOracle[] = {
    {4, 3, 6, {{1, 0}}, 27, 36, 29, 27},
    {4, 3, 6, {{1, 0}, {1, 1}}, 27, 60, 56, 54},
    {4, 4, 8, {{1, 0}}, 33, 41, 35, 33},
    {4, 8, 8, {{2, 0}, {2, 1}}, 33, 41, 34, 33},
    {8, 8, 16, {{3, 0}, {3, 1}}, 69, 82, 70, 66},
};

double Period(const OracleRow& row, bool failed, bool split, int32_t factor) {
  ScheduleSpec spec;
  spec.stages = row.stages;
  spec.pipelines = row.pipelines;
  spec.micro_batches = row.micro_batches;
  if (failed) spec.failed = row.failed;
  spec.split_backward = spec.staggered = split;
  spec.in_flight_factor = factor;
  const auto result = SimulateSchedule(spec);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result->period : 0;
}

TEST(ScheduleTest, ReproducesTheTableOfReRouting) {
  for (const OracleRow& row : kOracle) {
    SCOPED_TRACE(testing::Message() << row.stages << "," << row.pipelines << "," << row.micro_batches << " with "
                                    << row.failed.size() << " failed");
    EXPECT_DOUBLE_EQ(Period(row, false, false, 1), row.healthy);
    EXPECT_DOUBLE_EQ(Period(row, true, false, 2), row.coupled);
    EXPECT_DOUBLE_EQ(Period(row, true, true, 1), row.split);
    EXPECT_DOUBLE_EQ(Period(row, true, true, 2), row.split_twice);
  }
}

TEST(ScheduleTest, AHealthyPipelineThatSplitsAndStaggersIsFasterToo) {
  const OracleRow row = {4, 3, 6, {}, 0, 0, 0, 0};
  EXPECT_DOUBLE_EQ(Period(row, false, true, 2), 19);
}

TEST(ScheduleTest, InFlightForwardsStayWithinTheLimit) {
  ScheduleSpec spec;
  spec.stages = 5;
  spec.pipelines = 2;
  spec.micro_batches = 12;
  const auto result = SimulateSchedule(spec);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->in_flight_max, 5);
}

TEST(ScheduleTest, AStageWithoutALiveWorkerIsRefused) {
  ScheduleSpec spec;
  spec.stages = 2;
  spec.pipelines = 2;
  spec.micro_batches = 2;
  spec.failed = {{1, 0}, {1, 1}};
  EXPECT_EQ(SimulateSchedule(spec).status().code(), StatusCode::kFailedPrecondition);
  spec.steps = 1;
  EXPECT_EQ(SimulateSchedule(spec).status().code(), StatusCode::kInvalidArgument);
}

TEST(ScheduleTest, TheRecurrenceEqualsTheSimulationOfOnePipeline) {
  for (int32_t stages = 1; stages <= 6; ++stages) {
    for (int32_t micro_batches = 1; micro_batches <= 12; ++micro_batches) {
      for (const int64_t transfer : {0, 2}) {
        ScheduleSpec spec;
        spec.stages = stages;
        spec.micro_batches = micro_batches;
        spec.forward = 3;
        spec.backward_input = 2;
        spec.backward_weight = 4;
        spec.transfer = transfer;
        const auto result = SimulateSchedule(spec);
        ASSERT_TRUE(result.ok());
        const std::vector<StageTimes> times(static_cast<size_t>(stages), {3, 6, static_cast<double>(transfer)});
        // The simulation takes whatever is ready, so it may only be faster, and without transfers it is not.
        const double recurrence = OneFOneB(times, micro_batches);
        EXPECT_LE(result->period, recurrence) << stages << " " << micro_batches << " " << transfer;
        if (transfer == 0) {
          EXPECT_DOUBLE_EQ(result->period, recurrence) << stages << " " << micro_batches;
        } else {
          EXPECT_GE(result->period, recurrence * 0.9) << stages << " " << micro_batches;
        }
      }
    }
  }
}

TEST(ScheduleTest, TheClosedFormIsAnUpperBoundThatIsNearTheRecurrence) {
  double ratio_sum = 0, ratio_max = 0;
  int cases = 0;
  for (int number = 0; number < 500; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 21);
    std::vector<StageTimes> times;
    for (int64_t s = prng.Between(1, 8); s > 0; --s) {
      times.push_back({static_cast<double>(prng.Between(5, 15)), static_cast<double>(prng.Between(10, 30)),
                       static_cast<double>(prng.Between(0, 6))});
    }
    const auto count = prng.Between(1, 40);
    const double exact = OneFOneB(times, count);
    const double closed = OneFOneBClosedForm(times).Total(count);
    EXPECT_GE(closed, exact * (1 - 1e-9)) << "case " << number;
    const double ratio = closed / exact;
    ratio_sum += ratio;
    ratio_max = std::max(ratio_max, ratio);
    ++cases;
  }
  EXPECT_LT(ratio_sum / cases, 1.05);
  EXPECT_LT(ratio_max, 1.35);
}

TEST(ScheduleTest, AfterAFewRoundsTheRecurrenceGrowsByItsPeriod) {
  for (int number = 0; number < 100; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 4);
    std::vector<StageTimes> times;
    for (int64_t s = prng.Between(1, 8); s > 0; --s) {
      times.push_back({static_cast<double>(prng.Between(5, 15)), static_cast<double>(prng.Between(10, 30)),
                       static_cast<double>(prng.Between(0, 6))});
    }
    const auto count = static_cast<int64_t>(4 * times.size() + 8);
    const double extrapolated = OneFOneB(times, count) + 100 * OneFOneBClosedForm(times).period;
    const double exact = OneFOneB(times, count + 100);
    EXPECT_NEAR(extrapolated, exact, exact * 0.01) << "case " << number;
  }
}

// All cuts of the layers into stages, by the cost of pipeline templates.
TEST(ScheduleTest, TemplateCostOfEqualStagesIsTheKnownFormula) {
  EXPECT_DOUBLE_EQ(TemplateCost({3, 3, 3, 3}, 16), (16 + 4 - 1) * 3);
  EXPECT_DOUBLE_EQ(TemplateCost({5}, 4), 20);
  // Stage 1 is the slowest: sum 9 + (8 - 3 + 1 - 1) * 5 + (5 + 2).
  EXPECT_DOUBLE_EQ(TemplateCost({2, 5, 2}, 8), 9 + 25 + 7);
}

}  // namespace
}  // namespace everstep::planner
