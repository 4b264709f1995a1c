// ST-03 b: the longest legal header is accepted (writes a real 100 MB file).
#include <gtest/gtest.h>

#include "libcalib/weights/safetensors.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/temp_folder.h"

namespace calib::weights {
namespace {

TEST(SafetensorsLimit, St03LongestHeaderIsAccepted) {
  test::TempFolder folder;
  std::string header = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  header.resize(kMaxSafetensorsHeaderBytes, ' ');
  test::write_file(folder.file("model.safetensors"), test::safetensors_raw(header, "1234"));
  const SafetensorsFile file = parse_safetensors(MappedFile(folder.file("model.safetensors")));
  ASSERT_EQ(file.tensors.size(), 1u);
  EXPECT_EQ(file.tensors[0].offset, 8 + kMaxSafetensorsHeaderBytes);
}

}  // namespace
}  // namespace calib::weights
