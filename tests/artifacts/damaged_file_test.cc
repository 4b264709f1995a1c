// CASES.md H5-04: damaged stats.h5 and sens.h5 are refused, or read as what was written.

#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "libcalib/artifacts/sens_file.h"
#include "libcalib/artifacts/stats_file.h"
#include "tests/artifacts/example_artifacts.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using test::expect_error;
using test::TempFolder;

struct Artifact {
  const char* name;
  std::function<void(const std::string&)> write;
  std::function<std::string(const std::string&)> read;  // a text that changes with any number read
};

// Writing what was read gives the text to compare with: the writer is deterministic.
std::string rewritten_stats(const std::string& path) {
  const StatsFile read = read_stats_file(path);
  write_stats_file(path + ".again", read);
  return test::read_file(path + ".again");
}
std::string rewritten_sens(const std::string& path) {
  const sens::SensResult read = read_sens_file(path);
  write_sens_file(path + ".again", read);
  return test::read_file(path + ".again");
}

const Artifact kArtifacts[] = {
    {"stats", [](const std::string& path) { write_stats_file(path, test::example_stats(test::example_model(1), 1, 1, 70)); }, rewritten_stats},
    {"sens", [](const std::string& path) { write_sens_file(path, test::example_sens()); }, rewritten_sens},
    {"isolated", [](const std::string& path) { write_sens_file(path, test::example_isolated()); }, rewritten_sens},
};

class DamagedFile : public testing::TestWithParam<Artifact> {};

TEST_P(DamagedFile, TruncationsAreRefused) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  GetParam().write(path);
  const std::string good = test::read_file(path);
  std::vector<std::size_t> sizes = {0, 1, 8, 47, 48, 96, good.size() / 2, good.size() - 1};
  Rng rng(1);
  for (int i = 0; i < 200; ++i) sizes.push_back(static_cast<std::size_t>(rng.below(good.size())));
  for (const std::size_t size : sizes) {
    test::write_file(path, good.substr(0, size));
    expect_error([&] { GetParam().read(path); }, ErrorKind::kFormat, {path});
  }
  test::write_file(path, good.substr(0, good.size() / 2));
  expect_error([&] { GetParam().read(path); }, ErrorKind::kFormat, {std::to_string(good.size() / 2), std::to_string(good.size())});
}

TEST_P(DamagedFile, FlippedBytesAreRefusedOrHarmless) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  GetParam().write(path);
  const std::string good = test::read_file(path), expected = GetParam().read(path);
  Rng rng(2);
  int n_refused = 0;
  for (int i = 0; i < 200; ++i) {
    std::string bad = good;
    bad[rng.below(bad.size())] ^= static_cast<char>(1 + rng.below(255));
    test::write_file(path, bad);
    try {
      EXPECT_EQ(GetParam().read(path), expected) << "flip " << i;
    } catch (const Error& e) {
      EXPECT_TRUE(e.kind() == ErrorKind::kFormat || e.kind() == ErrorKind::kVersion) << e.what();
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos);
      ++n_refused;
    }
  }
  EXPECT_GT(n_refused, 20);  // if nothing were refused, nothing would be checked
}

TEST_P(DamagedFile, EveryByteOfTheFirstKilobytes) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  GetParam().write(path);
  const std::string good = test::read_file(path), expected = GetParam().read(path);
  for (std::size_t at = 0; at < 512; ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(~bad[at]);
    test::write_file(path, bad);
    try {
      EXPECT_EQ(GetParam().read(path), expected) << "byte " << at;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Artifacts, DamagedFile, testing::ValuesIn(kArtifacts), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace calib::artifacts
