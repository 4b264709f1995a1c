#pragma once
// kvsens as a user runs it: two tiny models, a text and statistics of the first.

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tests/cli/run_program.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib {

using Outcome = test::CommandResult;

inline Outcome run(const std::string& command) { return test::run_command(command); }

class Kvsens : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    test::write_hf_folder(test::make_tiny_model("m-llama"), folder_->file("m"));
    test::write_hf_folder(test::make_tiny_model("m-qwen3"), folder_->file("other"));
    test::write_file(folder_->file("a.txt"), test::txt(6000));
    stats_ = run("kvcalib " + inputs() + " -o " + folder_->file("stats.h5"));
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  void SetUp() override { ASSERT_EQ(stats_.exit_code, 0) << stats_.text; }

  static std::string inputs(const std::string& model = "m") {
    return "--model " + folder_->file(model) + " --data " + folder_->file("a.txt") + " --seq-len 256 --num-samples 3 --threads 1";
  }
  /// `part` stands in what kvsens prints.
  static void expect(const std::string& arguments, int code, const std::string& part) {
    const Outcome o = run("kvsens " + arguments);
    EXPECT_EQ(o.exit_code, code) << arguments << "\n" << o.text;
    EXPECT_NE(o.text.find(part), std::string::npos) << arguments << "\n" << o.text;
  }
  static std::string file(const std::string& name) { return folder_->file(name); }
  static bool exists(const std::string& name) { return std::filesystem::exists(folder_->file(name)); }

  inline static test::TempFolder* folder_ = nullptr;
  inline static Outcome stats_;
};

}  // namespace calib
