#include "kernels/codec/llamacpp_blocks.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

TEST(LlamaCppBlocks, BytesAreThoseOfTheReferenceQuantisers) {
  constexpr std::size_t kRecord = 32 * 4 + kQ8_0Bytes + kQ4_0Bytes;
  std::ifstream in(std::string(CALIB_SOURCE_DIR) + "/tests/golden/llamacpp_blocks.bin", std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  const std::string bytes = text.str();
  ASSERT_EQ(bytes.size(), 192 * kRecord);  // made by scripts/make_llamacpp_block_golden.py
  for (std::size_t i = 0; i < bytes.size() / kRecord; ++i) {
    float x[32];
    std::memcpy(x, &bytes[i * kRecord], sizeof x);
    std::uint8_t block[kQ8_0Bytes];
    EncodeCounters counters;
    encode_q8_0(x, block, &counters);
    ASSERT_EQ(std::memcmp(block, &bytes[i * kRecord + 128], kQ8_0Bytes), 0) << "q8_0 block " << i;
    encode_q4_0(x, block, &counters);
    ASSERT_EQ(std::memcmp(block, &bytes[i * kRecord + 128 + kQ8_0Bytes], kQ4_0Bytes), 0) << "q4_0 block " << i;
    EXPECT_EQ(counters.saturated, 0);
  }
}

TEST(LlamaCppBlocks, EveryCodeDecodes) {
  std::uint8_t block[kQ8_0Bytes];
  store_le16(block, f32_to_f16_rne(0.5f));
  for (int code = -128; code < 128; ++code) {
    block[2 + 5] = static_cast<std::uint8_t>(code);
    EXPECT_EQ(decode_q8_0(block, 5), 0.5f * static_cast<float>(code));
  }
  for (int code = 0; code < 16; ++code) {
    block[2 + 3] = static_cast<std::uint8_t>(code | (15 - code) << 4);
    EXPECT_EQ(decode_q4_0(block, 3), 0.5f * static_cast<float>(code - 8));
    EXPECT_EQ(decode_q4_0(block, 19), 0.5f * static_cast<float>(7 - code));
  }
}

TEST(LlamaCppBlocks, TheElementOfLargestMagnitudeTakesCodeMinusEight) {
  float x[32] = {1, -2, 2, 0.5f};
  std::uint8_t block[kQ4_0Bytes];
  EncodeCounters counters;
  encode_q4_0(x, block, &counters);
  EXPECT_EQ(decode_q4_0(block, 1), -2.0f);   // the first of two equal magnitudes
  EXPECT_EQ(decode_q4_0(block, 2), 1.75f);   // 2 would need code +8
}

TEST(LlamaCppBlocks, HugeAndTinyBlocksStayFinite) {
  for (const float scale : {3e38f, 1e9f, 1e-38f, 1e-45f}) {
    float x[32] = {};
    x[0] = scale, x[1] = -scale;
    std::uint8_t block[kQ8_0Bytes];
    EncodeCounters counters;
    encode_q8_0(x, block, &counters);
    for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isfinite(decode_q8_0(block, i)));
    EXPECT_EQ(decode_q8_0(block, 7), 0);
    encode_q4_0(x, block, &counters);
    for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isfinite(decode_q4_0(block, i)));
    EXPECT_EQ(counters.saturated, scale > 1 ? 2 : 0);
  }
}

}  // namespace
}  // namespace kvrt
