// GPUs as the driver's libraries tell them, with stand-ins for those libraries.
#include "worker/io/gpu_inventory.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace everstep {
namespace {

constexpr char kNone[] = "libeverstep-no-such-library.so.1";

class GpuInventoryTest : public ::testing::Test {
 protected:
  ~GpuInventoryTest() override { unsetenv("EVERSTEP_FAKE_GPUS"); }
};

TEST_F(GpuInventoryTest, WithoutAnyLibraryThereAreNone) { EXPECT_TRUE(FindGpus({kNone, kNone}).empty()); }

TEST_F(GpuInventoryTest, ManagementLibraryTellsNameMemoryAndUuidOfEach) {
  setenv("EVERSTEP_FAKE_GPUS", "2", 1);
  const std::vector<Device> gpus = FindGpus({FAKE_NVML, FAKE_CUDA});
  ASSERT_EQ(gpus.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const Device& gpu = gpus[static_cast<size_t>(i)];
    EXPECT_EQ(gpu.index, DeviceIndex(i));
    EXPECT_EQ(gpu.kind, DeviceKind::kGpu);
    EXPECT_EQ(gpu.model, "NVIDIA Fake 9000");
    EXPECT_EQ(gpu.memory_bytes, uint64_t{10 + static_cast<uint64_t>(i)} << 30);
    EXPECT_EQ(gpu.uuid, "GPU-00000000-0000-0000-0000-00000000000" + std::to_string(i));
    EXPECT_EQ(gpu.speed, 1.0);
  }
}

TEST_F(GpuInventoryTest, OneThatCanNotBeAskedIsLeftOut) {
  setenv("EVERSTEP_FAKE_GPUS", "3!1", 1);
  const std::vector<Device> gpus = FindGpus({FAKE_NVML, kNone});
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[1].index, DeviceIndex(1));
  EXPECT_EQ(gpus[1].uuid, "GPU-00000000-0000-0000-0000-000000000002");
}

TEST_F(GpuInventoryTest, DriverLibraryIsAskedWhereTheOtherIsMissingOrHasNoDriver) {
  for (const char* management : {kNone, FAKE_NVML}) {  // the stand-in has no driver without its variable
    const std::vector<Device> gpus = FindGpus({management, FAKE_CUDA});
    ASSERT_EQ(gpus.size(), 1u);
    EXPECT_EQ(gpus[0].model, "NVIDIA Fake 8000");
    EXPECT_EQ(gpus[0].memory_bytes, uint64_t{24} << 30);
    EXPECT_EQ(gpus[0].uuid, "GPU-00112233-4455-6677-8899-aabbccddeeff");
  }
}

TEST_F(GpuInventoryTest, AForeignLibraryOfThatNameIsNotAsked) {
  EXPECT_TRUE(FindGpus({FAKE_CUDA, kNone}).empty());
}

}  // namespace
}  // namespace everstep
