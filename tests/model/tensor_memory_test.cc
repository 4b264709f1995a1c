#include "libcalib/model/tensor_memory.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace calib::model {
namespace {

TEST(TensorMemory, KeepsBlocksWithinThePeakOfLiveOnes) {
  reuse_tensor_memory();
  const TensorMemory before = tensor_memory();
  const auto mib = [](double n) { return at::zeros({static_cast<std::int64_t>(n * 262144)}, at::kFloat); };
  {
    at::Tensor a = mib(8), b = mib(4);
    EXPECT_EQ(tensor_memory().live - before.live, 12 << 20);
    const void* address = a.data_ptr();
    a.reset();
    a = mib(7.9);  // rounds up to the same block
    EXPECT_EQ(a.data_ptr(), address);
    b.reset();
    EXPECT_EQ(tensor_memory().live - before.live, 8 << 20);
    EXPECT_GE(tensor_memory().kept, 4 << 20);
    const at::Tensor other = mib(2);  // no block of that size: what is kept makes room once the peak is reached
    const TensorMemory now = tensor_memory();
    EXPECT_LE(now.live + now.kept, now.peak_live);
  }
  const TensorMemory after = tensor_memory();
  EXPECT_EQ(after.live, before.live);
  EXPECT_LE(after.live + after.kept, after.peak_live);
  const at::Tensor small = at::zeros({100});
  EXPECT_EQ(tensor_memory().live, after.live);
}

}  // namespace
}  // namespace calib::model
