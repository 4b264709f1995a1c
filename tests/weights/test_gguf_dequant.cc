#include "libcalib/weights/gguf_dequant.h"

#include <cstring>
#include <map>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::weights {
namespace {

const std::map<std::string, TensorType> kReadable = {
    {"F32", TensorType::kF32},   {"F16", TensorType::kF16},   {"BF16", TensorType::kBF16}, {"Q4_0", TensorType::kQ4_0},
    {"Q4_1", TensorType::kQ4_1}, {"Q5_0", TensorType::kQ5_0}, {"Q5_1", TensorType::kQ5_1}, {"Q8_0", TensorType::kQ8_0},
    {"Q2_K", TensorType::kQ2K},  {"Q3_K", TensorType::kQ3K},  {"Q4_K", TensorType::kQ4K},  {"Q5_K", TensorType::kQ5K},
    {"Q6_K", TensorType::kQ6K},  {"IQ4_NL", TensorType::kIq4Nl}};

TEST(GgufDequant, EqualsTheReferenceBitForBit) {
  const auto golden = nlohmann::json::parse(test::read_file(CALIB_SOURCE_DIR "/tests/golden/gguf_dequant.json"));
  ASSERT_EQ(golden.size(), kReadable.size());
  for (const auto& [name, type] : kReadable) {
    SCOPED_TRACE(name);
    const auto hex = golden.at(name).at("blocks").get<std::string>();
    std::vector<unsigned char> bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2) bytes.push_back(static_cast<unsigned char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    const auto expected = golden.at(name).at("values").get<std::vector<std::uint32_t>>();
    const BlockLayout block = block_layout(type);
    ASSERT_EQ(bytes.size() / static_cast<std::size_t>(block.bytes) * static_cast<std::size_t>(block.elements), expected.size());
    std::vector<float> values(expected.size());
    dequantize(type, bytes.data(), static_cast<std::int64_t>(values.size()), values.data());
    // -0 and +0 are one number; every other pattern must agree.
    for (std::size_t i = 0; i < values.size(); ++i) {
      float want = 0;
      std::memcpy(&want, &expected[i], 4);
      ASSERT_EQ(values[i], want) << "value " << i;
    }
  }
}

TEST(GgufDequant, IntegersAndDoublesAreNumbers) {
  const std::int8_t i8[] = {-128, -1, 0, 127};
  float out[4];
  dequantize(TensorType::kI8, i8, 4, out);
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{-128, -1, 0, 127}));
  const std::uint16_t u16[] = {0, 1, 32768, 65535};
  dequantize(TensorType::kU16, u16, 4, out);
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{0, 1, 32768, 65535}));
  const double f64[] = {0.1, -2.5};
  dequantize(TensorType::kF64, f64, 2, out);
  EXPECT_EQ(out[0], 0.1f);
  EXPECT_EQ(out[1], -2.5f);
}

TEST(GgufDequant, TypeTableIsConsistent) {
  for (const auto& [name, type] : kReadable) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(dequantizes(type));
    EXPECT_GT(block_layout(type).bytes, 0);
  }
  EXPECT_FALSE(dequantizes(TensorType::kOther));
  EXPECT_FALSE(dequantizes(TensorType::kF8E4M3));
  for (std::uint32_t code : {4u, 5u, 31u, 99u}) EXPECT_EQ(find_gguf_type(code), nullptr) << code;
  EXPECT_EQ(find_gguf_type(12)->block.bytes, 144);
}

TEST(GgufDequant, PartOfABlockIsRefused) {
  char bytes[144] = {};
  float out[256];
  test::expect_error([&] { dequantize(TensorType::kQ4K, bytes, 128, out); }, ErrorKind::kInternal, {"elements"});
}

}  // namespace
}  // namespace calib::weights
