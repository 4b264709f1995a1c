// CASES.md H5-06: files of other writers.

#include <hdf5.h>

#include <gtest/gtest.h>

#include "libcalib/artifacts/sens_file.h"
#include "libcalib/artifacts/stats_file.h"
#include "tests/artifacts/example_artifacts.h"
#include "tests/support/expect_error.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using test::expect_error;
using test::TempFolder;

TEST(ForeignFile, VariableLengthStringsOfABigEndianMachine) {
  CALIB_SHARED_FILE(path, "misc/foreign_vlen_string_s390x.h5");
  expect_error([&] { StatsReader reader(path); }, ErrorKind::kFormat, {path, "not a stats file", "`schema`"});
}

TEST(ForeignFile, VariableLengthStringDataset) {
  CALIB_SHARED_FILE(path, "misc/foreign_vlen_string_dset.h5");
  expect_error([&] { StatsReader reader(path); }, ErrorKind::kFormat, {path, "not a stats file", "`schema`"});
  expect_error([&] { read_sens_file(path); }, ErrorKind::kFormat, {"not a sens file"});
}

TEST(ForeignFile, OneArtifactInPlaceOfAnother) {
  const TempFolder folder;
  write_stats_file(folder.file("stats.h5"), test::example_stats(test::example_model(1)));
  write_sens_file(folder.file("sens.h5"), test::example_sens());
  expect_error([&] { read_sens_file(folder.file("stats.h5")); }, ErrorKind::kFormat, {"stats.h5", "kvcalib.stats", "kvcalib.sens"});
  expect_error([&] { StatsReader reader(folder.file("sens.h5")); }, ErrorKind::kFormat, {"sens.h5", "kvcalib.sens", "kvcalib.stats"});
}

// Stored type of the same class and size in big-endian order; strings become fixed-length and null-terminated.
hid_t other_order(hid_t type) {
  const hid_t out = H5Tcopy(type);
  if (H5Tget_class(type) == H5T_STRING) {
    H5Tset_size(out, H5Tget_size(type) + 3);
    H5Tset_strpad(out, H5T_STR_SPACEPAD);
  } else {
    H5Tset_order(out, H5T_ORDER_BE);
  }
  return out;
}

struct Copy {
  hid_t from, to;
};

void copy_attributes(const Copy& copy, const char* name) {
  const hid_t from = H5Oopen(copy.from, name, H5P_DEFAULT), to = H5Oopen(copy.to, name, H5P_DEFAULT);
  H5O_info_t info;
  H5Oget_info(from, &info);
  for (hsize_t i = 0; i < info.num_attrs; ++i) {
    const hid_t attribute = H5Aopen_by_idx(from, ".", H5_INDEX_NAME, H5_ITER_INC, i, H5P_DEFAULT, H5P_DEFAULT);
    char attribute_name[256];
    H5Aget_name(attribute, sizeof attribute_name, attribute_name);
    const hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute), stored = other_order(type);
    const hid_t written = H5Acreate2(to, attribute_name, stored, space, H5P_DEFAULT, H5P_DEFAULT);
    std::vector<char> buffer(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)) * H5Tget_size(type));
    H5Aread(attribute, type, buffer.data());
    H5Awrite(written, type, buffer.data());
    for (const hid_t id : {written, attribute}) H5Aclose(id);
    for (const hid_t id : {type, stored}) H5Tclose(id);
    H5Sclose(space);
  }
  H5Oclose(from);
  H5Oclose(to);
}

herr_t copy_object(hid_t, const char* name, const H5O_info_t* info, void* data) {
  const Copy& copy = *static_cast<const Copy*>(data);
  if (std::string(name) != ".") {
    if (info->type == H5O_TYPE_GROUP) {
      H5Gclose(H5Gcreate2(copy.to, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    } else {
      const hid_t dataset = H5Dopen2(copy.from, name, H5P_DEFAULT), type = H5Dget_type(dataset), space = H5Dget_space(dataset), stored = other_order(type);
      const hid_t written = H5Dcreate2(copy.to, name, stored, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      const hssize_t n = H5Sget_simple_extent_npoints(space);
      std::vector<char> buffer(static_cast<std::size_t>(n) * H5Tget_size(type) + 1);
      if (n > 0) {
        H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer.data());
        H5Dwrite(written, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer.data());
      }
      for (const hid_t id : {written, dataset}) H5Dclose(id);
      for (const hid_t id : {type, stored}) H5Tclose(id);
      H5Sclose(space);
    }
  }
  copy_attributes(copy, name);
  return 0;
}

// Isolated runs stand beside scores and have their shapes.
TEST(ForeignFile, IsolatedRunsOfAnotherShapeAreRefused) {
  const TempFolder folder;
  const std::string path = folder.file("sens.h5");
  const std::vector<std::pair<const char*, std::vector<hsize_t>>> wrong = {
      {"/isolated/mean", {4, 3, 1}}, {"/isolated/se", {4, 2, 2}}, {"/isolated/se", {}}, {"/isolated/taken_up", {5}}};
  for (const auto& [name, extents] : wrong) {
    write_sens_file(path, test::example_isolated());
    const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    ASSERT_GE(file, 0);
    ASSERT_GE(H5Ldelete(file, name, H5P_DEFAULT), 0);
    if (!extents.empty()) {
      const hid_t space = H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr);
      const hid_t dataset =
          H5Dcreate2(file, name, std::string(name) == "/isolated/taken_up" ? H5T_STD_U8LE : H5T_IEEE_F64LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      H5Dclose(dataset);
      H5Sclose(space);
    }
    H5Fclose(file);
    test::expect_error([&] { read_sens_file(path); }, ErrorKind::kFormat, {"sens.h5", name});
  }
}

TEST(ForeignFile, BigEndianCopyReadsTheSame) {
  const TempFolder folder;
  write_stats_file(folder.file("a.h5"), test::example_stats());
  const Copy copy = {H5Fopen(folder.file("a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT),
                     H5Fcreate(folder.file("be.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)};
  ASSERT_GE(copy.from, 0);
  ASSERT_GE(copy.to, 0);
  ASSERT_GE(H5Ovisit(copy.from, H5_INDEX_NAME, H5_ITER_INC, copy_object, const_cast<Copy*>(&copy)), 0);
  H5Fclose(copy.from);
  H5Fclose(copy.to);
  EXPECT_NE(test::read_file(folder.file("be.h5")), test::read_file(folder.file("a.h5")));

  write_stats_file(folder.file("be_again.h5"), read_stats_file(folder.file("be.h5")));
  write_stats_file(folder.file("a_again.h5"), read_stats_file(folder.file("a.h5")));
  EXPECT_EQ(test::read_file(folder.file("be_again.h5")), test::read_file(folder.file("a_again.h5")));
}

}  // namespace
}  // namespace calib::artifacts
