#include "kernels/codec/llamacpp_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace kvrt {
namespace {

std::string golden(const char* name) {
  std::ifstream in(std::string(CALIB_SOURCE_DIR) + "/tests/golden/" + name, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

constexpr Format kFormats[] = {Format::kQ8_0, Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1};
constexpr Format kAllBlocks[] = {Format::kQ8_0, Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kIq4Nl};

TEST(LlamaCppBlocks, BytesAreThoseOfTheReferenceQuantisers) {
  constexpr std::size_t kRecord = 32 * 4 + kQ8_0Bytes + kQ4_0Bytes + kQ4_1Bytes + kQ5_0Bytes + kQ5_1Bytes;
  const std::string bytes = golden("llamacpp_blocks.bin"), iq4_nl = golden("llamacpp_iq4_nl.bin");
  ASSERT_EQ(bytes.size(), 192 * kRecord);
  ASSERT_EQ(iq4_nl.size(), 192u * kIq4NlBytes);  // both made by scripts/make_llamacpp_block_golden.py
  for (std::size_t i = 0; i < bytes.size() / kRecord; ++i) {
    float x[32];
    std::memcpy(x, &bytes[i * kRecord], sizeof x);
    std::size_t at = i * kRecord + sizeof x;
    for (const Format format : kFormats) {
      std::uint8_t block[kQ8_0Bytes];
      EncodeCounters counters;
      encode_llama_block(format, x, block, &counters);
      const std::size_t n = static_cast<std::size_t>(llama_block_bytes(format));
      ASSERT_EQ(std::memcmp(block, &bytes[at], n), 0) << "format " << static_cast<int>(format) << " block " << i;
      EXPECT_EQ(counters.saturated, 0);
      at += n;
    }
    std::uint8_t block[kIq4NlBytes];
    EncodeCounters counters;
    encode_llama_block(Format::kIq4Nl, x, block, &counters);
    const bool is_zero = std::all_of(x, x + 32, [](float v) { return std::abs(v) < 1e-15f; });  // the reference leaves the codes of such a block unset
    ASSERT_EQ(std::memcmp(block, &iq4_nl[i * kIq4NlBytes], is_zero ? 2 : kIq4NlBytes), 0) << "iq4_nl block " << i;
  }
}

TEST(LlamaCppBlocks, EveryCodeDecodes) {
  std::uint8_t block[kQ8_0Bytes];
  store_le16(block, f32_to_f16_rne(0.5f));
  for (int code = -128; code < 128; ++code) {
    block[2 + 5] = static_cast<std::uint8_t>(code);
    EXPECT_EQ(decode_q8_0(block, 5), 0.5f * static_cast<float>(code));
  }
  const auto value = [&](Format format, int i) { return decode_llama_block(format, block, i); };
  for (int code = 0; code < 16; ++code) {
    block[2 + 3] = static_cast<std::uint8_t>(code | (15 - code) << 4);
    EXPECT_EQ(value(Format::kQ4_0, 3), 0.5f * static_cast<float>(code - 8));
    EXPECT_EQ(value(Format::kQ4_0, 19), 0.5f * static_cast<float>(7 - code));
  }
  store_le16(block + 2, f32_to_f16_rne(-3.0f));  // the minimum of q4_1 and q5_1
  for (int code = 0; code < 32; ++code) {
    block[4 + 3] = static_cast<std::uint8_t>(code);
    if (code < 16) {
      EXPECT_EQ(value(Format::kQ4_1, 3), 0.5f * static_cast<float>(code) - 3.0f);
    }
    store_le32(block + 4, static_cast<std::uint32_t>(code >> 4) << 19);
    block[8 + 3] = static_cast<std::uint8_t>((code & 15) << 4);
    EXPECT_EQ(value(Format::kQ5_1, 19), 0.5f * static_cast<float>(code) - 3.0f);
  }
  store_le16(block, f32_to_f16_rne(0.5f));
  for (int code = 0; code < 16; ++code) {
    block[2 + 3] = static_cast<std::uint8_t>(code | (15 - code) << 4);
    EXPECT_EQ(value(Format::kIq4Nl, 3), 0.5f * Iq4NlLevels{}.level[code]);
    EXPECT_EQ(value(Format::kIq4Nl, 19), 0.5f * Iq4NlLevels{}.level[15 - code]);
  }
  for (int code = 0; code < 32; ++code) {
    store_le32(block + 2, static_cast<std::uint32_t>(code >> 4) << 19);
    block[6 + 3] = static_cast<std::uint8_t>((code & 15) << 4);
    EXPECT_EQ(value(Format::kQ5_0, 19), 0.5f * static_cast<float>(code - 16));
  }
}

// The reference searches by bisection and compares distances; midpoints give the same for every fp32 value near them.
TEST(LlamaCppBlocks, NearestLevelOfIq4NlIsThatOfTheSearch) {
  const Iq4NlLevels table;
  const auto search = [&](float y) {
    if (y <= table.level[0]) return 0;
    if (y >= table.level[15]) return 15;
    int upper = 1;
    while (y >= table.level[upper]) ++upper;
    return y - table.level[upper - 1] < table.level[upper] - y ? upper - 1 : upper;
  };
  for (int i = 0; i < 15; ++i) {
    float y = (table.level[i] + table.level[i + 1]) / 2;
    for (int k = 0; k < 8; ++k) y = std::nextafter(y, -200.0f);
    for (int k = 0; k < 16; ++k, y = std::nextafter(y, 200.0f)) ASSERT_EQ(detail::nearest_iq4_nl(y), search(y)) << y;
  }
  for (float y = -140; y < 140; y += 0.015625f) ASSERT_EQ(detail::nearest_iq4_nl(y), search(y)) << y;
}

TEST(LlamaCppBlocks, TheElementOfLargestMagnitudeTakesCodeMinusEight) {
  const float x[32] = {1, -2, 2, 0.5f};
  std::uint8_t block[kQ4_0Bytes];
  EncodeCounters counters;
  encode_llama_block(Format::kQ4_0, x, block, &counters);
  EXPECT_EQ(decode_llama_block(Format::kQ4_0, block, 1), -2.0f);  // the first of two equal magnitudes
  EXPECT_EQ(decode_llama_block(Format::kQ4_0, block, 2), 1.75f);  // 2 would need code +8
}

TEST(LlamaCppBlocks, HugeAndTinyBlocksStayFinite) {
  for (const Format format : kAllBlocks) {
    for (const float scale : {3e38f, 1e9f, 1e-38f, 1e-45f}) {
      float x[32] = {};
      x[0] = scale, x[1] = -scale;
      std::uint8_t block[kQ8_0Bytes];
      EncodeCounters counters;
      encode_llama_block(format, x, block, &counters);
      for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isfinite(decode_llama_block(format, block, i))) << static_cast<int>(format);
      EXPECT_EQ(counters.saturated > 0, scale > 1);
    }
  }
}

}  // namespace
}  // namespace kvrt
