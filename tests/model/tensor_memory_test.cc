#include "libcalib/model/tensor_memory.h"

#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace calib::model {
namespace {

TEST(TensorMemory, FreedPagesServeTheNextTensor) {
  reuse_tensor_memory();
  const TensorMemory before = tensor_memory();
  const auto mib = [](double n) { return at::zeros({static_cast<std::int64_t>(n * 262144)}, at::kFloat); };
  {
    at::Tensor a = mib(8), b = mib(4), c = mib(2);
    EXPECT_EQ(tensor_memory().live - before.live, 14 << 20);
    const TensorMemory peak = tensor_memory();
    const auto* const address = static_cast<const char*>(a.data_ptr());
    a.reset();
    b.reset();  // the places of a and b merge
    EXPECT_EQ(tensor_memory().live - before.live, 2 << 20);
    const at::Tensor d = mib(12);
    EXPECT_EQ(d.data_ptr(), address);
    EXPECT_EQ(tensor_memory().touched, peak.touched);
    EXPECT_EQ(tensor_memory().peak_live, peak.peak_live);
  }
  EXPECT_EQ(tensor_memory().live, before.live);
  const at::Tensor small = at::zeros({100});
  EXPECT_EQ(tensor_memory().live, before.live);
}

TEST(TensorMemory, HoldsItsContentsThroughRandomUse) {
  reuse_tensor_memory();
  const TensorMemory before = tensor_memory();
  std::vector<at::Tensor> kept(24);
  std::uint32_t state = 1;
  const auto next = [&] { return state = state * 1664525u + 1013904223u, state >> 8; };
  for (int step = 0; step < 600; ++step) {
    const std::size_t i = next() % kept.size();
    if (kept[i].defined()) {
      const float value = static_cast<float>(i);
      ASSERT_EQ(kept[i].min().item<float>(), value);
      ASSERT_EQ(kept[i].max().item<float>(), value);
      kept[i].reset();
    } else {
      kept[i] = at::full({262144 + static_cast<std::int64_t>(next() % 400000)}, static_cast<double>(i), at::kFloat);
    }
  }
  kept.clear();
  EXPECT_EQ(tensor_memory().live, before.live);
  EXPECT_LE(tensor_memory().touched, tensor_memory().peak_live * 3 / 2);
}

}  // namespace
}  // namespace calib::model
