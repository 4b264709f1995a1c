#include "libcalib/io/safetensors_file.h"

#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::io {
namespace {

using test::expect_error;
using test::TempFolder;

std::vector<NamedArray> example() {
  return {{"layers.1.k.mean", {2, 2}, std::vector<float>{1, -2.5f, 0, 1e-30f}},
          {"layers.0.k.ef_order", {3}, std::vector<std::int32_t>{2, 0, 1}},
          {"layers.0.v.clip_lo", {0}, std::vector<float>{}},
          {"scalar", {}, std::vector<float>{7}}};
}

// A file with this header text and data, padding as given.
std::string file_of(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}

TEST(SafetensorsFile, RoundTripSortedByName) {
  const TempFolder folder;
  const std::string path = folder.file("plan.safetensors");
  write_safetensors_file(path, example(), {{"plan", "x"}});
  const std::vector<NamedArray> back = read_safetensors_file(path);
  ASSERT_EQ(back.size(), 4u);
  EXPECT_EQ(back[0].name, "layers.0.k.ef_order");
  EXPECT_EQ(std::get<std::vector<std::int32_t>>(back[0].values), (std::vector<std::int32_t>{2, 0, 1}));
  EXPECT_EQ(back[1].shape, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(std::get<std::vector<float>>(back[2].values), (std::vector<float>{1, -2.5f, 0, 1e-30f}));
  EXPECT_EQ(back[2].shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_TRUE(back[3].shape.empty());
}

TEST(SafetensorsFile, BytesAreStableAndAligned) {
  std::vector<NamedArray> shuffled = example();
  std::swap(shuffled[0], shuffled[3]);
  const std::string bytes = safetensors_bytes(example());
  EXPECT_EQ(safetensors_bytes(shuffled), bytes);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes.size(), 8 + length + 4 * (4 + 3 + 0 + 1));
}

TEST(SafetensorsFile, WriterRefusesWhatIsNotWritable) {
  expect_error([] { safetensors_bytes({{"a", {2}, std::vector<float>{1}}}); }, ErrorKind::kInternal, {"a"});
  expect_error([] { safetensors_bytes({{"a", {1}, std::vector<float>{1}}, {"a", {1}, std::vector<float>{1}}}); }, ErrorKind::kInternal, {"twice"});
  expect_error([] { safetensors_bytes({{"a", {2}, std::vector<float>{1, std::nanf("")}}}); }, ErrorKind::kNumeric, {"a", "element 1"});
}

TEST(SafetensorsFile, ReaderIsStrict) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  const auto refuse = [&](const std::string& bytes, const std::vector<std::string>& parts, ErrorKind kind = ErrorKind::kFormat) {
    test::write_file(path, bytes);
    expect_error([&] { read_safetensors_file(path); }, kind, parts);
  };
  const std::string eight(8, '\0');
  refuse("", {"0 bytes"});
  refuse("short", {"5 bytes"});
  refuse(std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}", {"9223372036854775807"});
  refuse(file_of("[]", ""), {"not an object"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", ""), {"array a", "0 to 8 of 0"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", eight), {"array a", "3 elements"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", eight), {"starts at byte 4, expected 0"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", eight), {"4 bytes past"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
                 eight.substr(4)),
         {"overlap"});
  refuse(file_of("{\"a\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,8]}}", eight), {"F64", "expected F32 or I32"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", eight), {"/a/shape/0"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", eight), {"/a/shape"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", eight.substr(4)), {"/a/shape is missing"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{}}", eight.substr(4)), {"twice"});
  refuse(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", std::string("\x00\x00\xc0\x7f", 4)), {"a", "not finite"}, ErrorKind::kNumeric);
}

TEST(SafetensorsFile, EveryTruncationIsRefused) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors"), whole = safetensors_bytes(example());
  for (std::size_t n = 0; n < whole.size(); ++n) {
    test::write_file(path, whole.substr(0, n));
    expect_error([&] { read_safetensors_file(path); }, ErrorKind::kFormat, {path});
  }
}

}  // namespace
}  // namespace calib::io
