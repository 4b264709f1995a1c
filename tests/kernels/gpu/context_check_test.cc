// The committed goldens: what ref gives today, and what contexts on the executor give. On a GPU scripts/gpu_check.sh compares the same.

#include "tests/kernels/gpu/context_check.h"

#include <cmath>
#include <fstream>

#include "gtest/gtest.h"

namespace kvrt::testing {
namespace {

std::vector<ContextResult> goldens() {
  std::ifstream file(CALIB_SOURCE_DIR "/tests/kernels/goldens/contexts.bin", std::ios::binary);
  return read_goldens(file);
}

TEST(ContextGoldens, AreWhatTheReferenceGives) {
  const std::vector<ContextResult> expected = goldens();
  ASSERT_EQ(expected.size(), context_specs().size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ContextResult result;
    const Status status = run_context(context_specs()[i], KVRT_BACKEND_REF, &result);
    ASSERT_TRUE(status.ok()) << status.text();
    double worst;
    EXPECT_EQ(compare_contexts(expected[i], result, &worst), "") << name_of(context_specs()[i]);
    EXPECT_LT(worst, 1e-2);
  }
}

TEST(ContextGoldens, AreWhatTheDeviceGives) {
  const std::vector<ContextResult> expected = goldens();
  ASSERT_EQ(expected.size(), context_specs().size());
  int n = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ContextResult result;
    const Status status = run_context(context_specs()[i], KVRT_BACKEND_CUDA, &result);
    if (status.code() == Code::kUnsupported) continue;
    ASSERT_TRUE(status.ok()) << status.text();
    double worst;
    EXPECT_EQ(compare_contexts(expected[i], result, &worst), "") << name_of(context_specs()[i]);
    ++n;
  }
  EXPECT_GE(n, 5);
}

TEST(ContextGoldens, AnyChangeIsSeen) {
  ContextResult result;
  ASSERT_TRUE(run_context(context_specs()[1], KVRT_BACKEND_REF, &result).ok());
  double worst;
  ContextResult changed = result;
  ++changed.pages[1][KVRT_V][changed.pages[1][KVRT_V].size() / 2];
  EXPECT_EQ(compare_contexts(result, changed, &worst), "base pages of V differ");
  changed = result;
  changed.out[3] += 2 * result.tolerance[3];
  EXPECT_NE(compare_contexts(result, changed, &worst), "");
  changed.out[3] = NAN;
  EXPECT_NE(compare_contexts(result, changed, &worst), "");
}

}  // namespace
}  // namespace kvrt::testing
