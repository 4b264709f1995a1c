#pragma once
// kvplan over statistics and scores of a small synthetic model, in one folder for all tests of an executable.

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "libcalib/artifacts/stats_file.h"
#include "libcalib/base/sha256.h"
#include "libcalib/quant/calibrated_params.h"
#include "tests/plan/synthetic_sens.h"
#include "tests/quant/layer_stats.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

class Kvplan : public testing::Test {
 protected:
  static constexpr int kLayers = 6;
  static constexpr std::int64_t kSinks = 4;

  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    const ModelIdentity model = plan_test::tiny_model(kLayers);
    artifacts::StatsFile stats;
    stats.header.model = model;
    stats.header.n_sinks = kSinks;
    stats.header.data.documents_sha256 = std::string(64, 'd');
    stats.header.provenance.tool = "kvcalib";
    for (const LayerGeometry& g : model.layers) {
      Rng rng(static_cast<std::uint64_t>(g.index) + 1);
      const quant_test::Fill fill = [&](std::int64_t, int, int c) { return static_cast<float>(rng.normal() * (c == 5 ? 14 : 1) + (c == 9 ? 3 : 0)); };
      stats.layers.push_back(quant_test::layer_stats(g, kSinks, 200, fill, fill, fill));
    }
    artifacts::write_stats_file(file("stats.h5"), stats);
    sens::SensResult sens = plan_test::synthetic_sens(
        model,
        {"bf16", "fp8e4m3.head", "int8.token.g", "int4.token.g32", "int4.token.g64.center.had", "int4.channel.g64.pre", "int3.channel.g32.pre",
         "int3.token.g64.had", "int2.token.g32"},
        {0, 128}, [](int l, Side s) { return 0.02 * std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); }, kSinks);
    sens.calibration_data.documents_sha256 = std::string(64, 'd');
    sens.data.documents_sha256 = std::string(64, 'e');
    artifacts::write_sens_file(file("sens.h5"), sens);
    sens.data.documents_sha256 = std::string(64, 'd');
    artifacts::write_sens_file(file("same_text.h5"), sens);
    sens.model.weights_sha256[0] = 'f';
    artifacts::write_sens_file(file("foreign.h5"), sens);
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  static std::string file(const std::string& name) { return folder_->file(name); }
  static bool exists(const std::string& name) { return std::filesystem::exists(file(name)); }

  static Outcome run(const std::string& arguments) {
    const std::string err = file("stderr.txt");
    FILE* pipe = popen((std::string(CALIB_BIN_DIR) + "/kvplan " + arguments + " 2>" + err).c_str(), "r");
    Outcome outcome;
    if (pipe == nullptr) return outcome;
    std::array<char, 4096> buffer;
    for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) outcome.out.append(buffer.data(), n);
    const int status = pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    outcome.err = test::read_file(err);
    return outcome;
  }
  static std::string inputs() { return "--stats " + file("stats.h5") + " --sens " + file("sens.h5"); }

  /// One `error:` line, this exit code, these parts, and no file under `absent`.
  static void expect_refusal(const std::string& arguments, int exit_code, const std::vector<std::string>& parts, const std::string& absent = "") {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.exit_code, exit_code) << arguments << '\n' << o.err;
    EXPECT_THAT(o.err, StartsWith("error: ")) << arguments;
    EXPECT_THAT(o.out, "") << arguments;
    for (const std::string& part : parts) EXPECT_THAT(o.err, HasSubstr(part)) << arguments;
    EXPECT_TRUE(absent.empty() || !exists(absent)) << arguments;
  }

  inline static test::TempFolder* folder_ = nullptr;
};

}  // namespace calib
