// kvsens isolate, and what kvplan and kvsens joint make of its runs.

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "tests/cli/kvsens_fixture.h"

namespace calib {
namespace {

class Isolate : public Kvsens {
 protected:
  static void SetUpTestSuite() {
    Kvsens::SetUpTestSuite();
    test::write_file(file("scores.txt"), test::txt(6000).substr(3000));
    test::write_file(file("isolated.txt"), "Isolated text. " + test::txt(9000).substr(6000));
    test::write_file(file("verify.txt"), "Verification text. " + test::txt(12000).substr(9000));
    const std::string scored = "kvsens " + model() + "--data " + file("scores.txt") + " --stats " + file("stats.h5") +
                               " --window 0,32 --candidates bf16,int8.token.g,int4.token.g,int4.channel.g32.pre,int3.token.g,int2.token.g --metric ";
    scored_ = run(scored + "fisher_softmax,attn_out -o " + file("r.h5"));
    truth_ = run(scored + "fisher_softmax,logit_kl -o " + file("truth.h5"));
  }
  void SetUp() override {
    Kvsens::SetUp();
    ASSERT_EQ(scored_.exit_code, 0) << scored_.text;
    ASSERT_EQ(truth_.exit_code, 0) << truth_.text;
  }
  static std::string model() { return "--model " + file("m") + " --threads 1 --seq-len 256 --num-samples 2 "; }
  static std::string isolate(const std::string& sens = "r.h5") { return "kvsens isolate " + model() + "--sens " + file(sens) + " --above " + limit() + " "; }
  static std::size_t scheme(const sens::SensResult& r, const char* name) {
    return static_cast<std::size_t>(std::find(r.schemes.begin(), r.schemes.end(), name) - r.schemes.begin());
  }
  /// Half of the units pass it with 3 bits. (At a head_dim of 8 those of 2 bits take no fewer bytes, and are dominated.)
  static std::string limit() {
    const sens::SensResult r = artifacts::read_sens_file(file("r.h5"));
    std::vector<double> three_bits;
    for (std::size_t u = 0; u < r.units.size(); ++u) three_bits.push_back(r.scores.at("fisher_softmax").mean[r.index(u, scheme(r, "int3.token.g"), 0)]);
    std::nth_element(three_bits.begin(), three_bits.begin() + static_cast<std::ptrdiff_t>(three_bits.size() / 2), three_bits.end());
    return fmt::format("{}", three_bits[three_bits.size() / 2]);
  }
  /// What stands after the warnings.
  static nlohmann::json json_of(const Outcome& o) { return nlohmann::json::parse(o.text.substr(std::min(o.text.find('{'), o.text.size()))); }
  inline static Outcome scored_, truth_;
};

TEST_F(Isolate, MeasuresWhatKvsensMeasuresAndPlansSpendIt) {
  const Outcome o = run(isolate() + "--data " + file("scores.txt") + " -o " + file("i.h5"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"logit_kl / estimate", "K: logit_kl = ", "V: logit_kl = ", "farthest off: layer", "units replaced: "})
    EXPECT_NE(o.text.find(part), std::string::npos) << part << "\n" << o.text;
  const sens::SensResult before = artifacts::read_sens_file(file("r.h5")), after = artifacts::read_sens_file(file("i.h5")),
                         truth = artifacts::read_sens_file(file("truth.h5"));
  ASSERT_TRUE(after.isolated);
  const sens::IsolatedRuns& runs = *after.isolated;
  EXPECT_EQ(runs.metric, "fisher_softmax");
  ASSERT_EQ(truth.schemes, after.schemes);
  const std::vector<double>& estimate = after.scores.at("fisher_softmax").mean;
  std::size_t n_measured = 0, n_taken = 0, n_dominated = 0;
  for (std::size_t u = 0; u < after.units.size(); ++u) {
    n_taken += runs.taken_up[u];
    const auto survives = [&](std::size_t s, std::size_t w) {
      const auto per_channel = [&](std::size_t x) { return after.schemes[x].find(".channel.") != std::string::npos; };
      const auto bytes = [&](std::size_t x) { return after.base_bytes_per_token[u * after.schemes.size() + x]; };
      for (std::size_t x = 0; x < after.schemes.size(); ++x)
        if (x != s && after.valid[u * after.schemes.size() + x] && per_channel(x) == per_channel(s) && bytes(x) <= bytes(s) &&
            estimate[after.index(u, x, w)] <= estimate[after.index(u, s, w)])
          return false;
      return true;
    };
    bool large = false;
    for (std::size_t s = 0; s < after.schemes.size(); ++s)
      for (std::size_t w = 0; w < 2; ++w) {
        const std::size_t i = after.index(u, s, w);
        if (!after.valid[u * after.schemes.size() + s]) continue;
        large = large || (survives(s, w) && estimate[i] > runs.above);
        EXPECT_TRUE(!runs.taken_up[u] || runs.measured(i) == survives(s, w)) << u << " " << after.schemes[s];
        n_dominated += runs.taken_up[u] && !survives(s, w);
        if (!runs.measured(i)) continue;
        ++n_measured;
        EXPECT_NEAR(runs.mean[i], truth.scores.at("logit_kl").mean[i], 1e-6 * truth.scores.at("logit_kl").mean[i]) << after.schemes[s];
        EXPECT_NEAR(runs.se[i], truth.scores.at("logit_kl").se[i], 1e-6 * truth.scores.at("logit_kl").se[i]) << after.schemes[s];
      }
    EXPECT_EQ(runs.taken_up[u], large) << u;
  }
  EXPECT_GE(n_taken, 1u);
  EXPECT_GE(n_dominated, 1u) << "one option of each taken up that is not measured, or the test says little";
  EXPECT_LT(n_taken, after.units.size());
  EXPECT_GT(n_measured, 4 * n_taken);
  for (const auto& [name, table] : before.scores)
    for (std::size_t i = 0; i < table.mean.size(); ++i) EXPECT_TRUE(after.scores.at(name).mean[i] == table.mean[i] || std::isnan(table.mean[i])) << name;

  const std::string plan = " --budget 9 --context 4096 -o ";
  ASSERT_EQ(run("kvplan --sens " + file("r.h5") + plan + file("before.json")).exit_code, 0);
  const Outcome made = run("kvplan --sens " + file("i.h5") + plan + file("after.json"));
  ASSERT_EQ(made.exit_code, 0) << made.text;
  EXPECT_NE(made.text.find(fmt::format("{} of {} units by isolated runs, where fisher_softmax passes ", n_taken, after.units.size())), std::string::npos)
      << made.text;
  const plan::Plan read = artifacts::read_plan(file("after.json"));
  ASSERT_TRUE(read.summary.predicted->isolated);
  EXPECT_EQ(*read.summary.predicted->isolated, (plan::IsolatedUse{n_taken, runs.above, runs.k.value, runs.v.value}));
  EXPECT_FALSE(artifacts::read_plan(file("before.json")).summary.predicted->isolated);
  EXPECT_TRUE(std::any_of(read.decision.begin(), read.decision.end(), [](const plan::Reason& r) { return r.rule == "isolated"; }));
  EXPECT_EQ(run("kvplan check " + file("after.json")).exit_code, 0);
  double sum = 0;
  for (std::size_t u = 0; u < after.units.size(); ++u) {
    const auto layer = std::find_if(read.layers.begin(), read.layers.end(), [&](const plan::LayerPlan& l) { return l.index == after.units[u].layer; });
    const std::size_t w = read.window_of(*layer) == 0 ? 0 : 1,
                      i = after.index(u, scheme(after, kvrt::to_string(layer->unit(after.units[u].side).scheme).c_str()), w);
    sum += runs.taken_up[u] ? truth.scores.at("logit_kl").mean[i] / runs.slope(after.units[u].side).value : estimate[i];
  }
  EXPECT_NEAR(read.summary.predicted->score, sum, 1e-6 * sum);
  const Outcome other = run("kvplan --sens " + file("i.h5") + " --metric attn_out" + plan + file("no.json"));
  EXPECT_EQ(other.exit_code, 2) << other.text;
  EXPECT_NE(other.text.find("--metric attn_out"), std::string::npos) << other.text;
  EXPECT_NE(other.text.find("use --metric fisher_softmax"), std::string::npos) << other.text;
  EXPECT_FALSE(exists("no.json"));

  // The same inputs give the same arrays, whatever the grid held before.
  ASSERT_EQ(run(isolate("i.h5") + "--data " + file("scores.txt") + " -o " + file("i.h5")).exit_code, 0);
  const sens::SensResult again = artifacts::read_sens_file(file("i.h5"));
  for (std::size_t i = 0; i < runs.mean.size(); ++i) EXPECT_TRUE(again.isolated->mean[i] == runs.mean[i] || std::isnan(runs.mean[i]));
}

TEST_F(Isolate, JointRunsComeAfterItOnOtherText) {
  ASSERT_EQ(run(isolate() + "--data " + file("isolated.txt") + " -o " + file("i.h5")).exit_code, 0);
  const std::string joint = "kvsens joint " + model() + "--runs 6 --sens " + file("i.h5") + " -o " + file("j.h5") + " --data ";
  for (const char* seen : {"scores.txt", "isolated.txt"}) {
    const Outcome refused = run(joint + file(seen));
    EXPECT_EQ(refused.exit_code, 5) << refused.text;
    EXPECT_NE(refused.text.find("neither has seen"), std::string::npos) << refused.text;
  }
  const Outcome o = run(joint + file("verify.txt"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  EXPECT_NE(o.text.find("fisher_softmax"), std::string::npos) << o.text;
  const sens::SensResult read = artifacts::read_sens_file(file("j.h5"));
  ASSERT_TRUE(read.joint && read.isolated);
  ASSERT_EQ(run("kvplan --sens " + file("j.h5") + " --budget 9 --context 4096 -o " + file("j.json")).exit_code, 0);
  ASSERT_EQ(run("kvplan --sens " + file("i.h5") + " --budget 9 --context 4096 -o " + file("i.json")).exit_code, 0);
  const plan::Plan fitted = artifacts::read_plan(file("j.json")), plain = artifacts::read_plan(file("i.json"));
  ASSERT_TRUE(fitted.summary.predicted->joint && fitted.summary.predicted->isolated);
  // The fit is to sums of replaced scores: ln slope is the mean of ln(measured / sum), runs of the plan's window weighed by their error.
  double ln_slope = 0, total = 0;
  for (std::size_t r = 0; r < read.joint->size(); ++r) {
    if (read.windows[static_cast<std::size_t>(read.joint->tier_class[r * read.joint->n_layers])] != fitted.window_tokens) continue;
    double sum = 0;
    for (std::size_t u = 0; u < read.units.size(); ++u) {
      const std::size_t l = u / 2, at = r * read.joint->n_layers + l;
      const std::size_t i = read.index(u, static_cast<std::size_t>(read.units[u].side == Side::kK ? read.joint->k[at] : read.joint->v[at]),
                                       static_cast<std::size_t>(read.joint->tier_class[at]));
      const sens::IsolatedRuns& runs = *read.isolated;
      sum += runs.taken_up[u] ? runs.mean[i] / runs.slope(read.units[u].side).value : read.scores.at("fisher_softmax").mean[i];
    }
    const double weight = 1 / (0.05 * 0.05 + std::pow(read.joint->kld_se[r] / read.joint->kld[r], 2));
    ln_slope += weight * std::log(read.joint->kld[r] / sum), total += weight;
  }
  ln_slope /= total;
  EXPECT_NEAR(fitted.summary.predicted->joint->slope, std::exp(ln_slope), 1e-9 * std::exp(ln_slope));
  EXPECT_NEAR(fitted.summary.predicted->score, plain.summary.predicted->score, 1e-9 * plain.summary.predicted->score);

  // Once more onto a file with joint runs: they tested other sums.
  const Outcome again = run(isolate("j.h5") + "--data " + file("isolated.txt") + " -o " + file("again.h5"));
  ASSERT_EQ(again.exit_code, 0) << again.text;
  EXPECT_NE(again.text.find("the 6 joint runs of"), std::string::npos) << again.text;
  EXPECT_NE(again.text.find("run kvsens joint on the result"), std::string::npos) << again.text;
  EXPECT_FALSE(artifacts::read_sens_file(file("again.h5")).joint);
}

TEST_F(Isolate, SaysWhatItWouldDo) {
  const std::string data = "--data " + file("scores.txt") + " -o " + file("no.h5");
  const Outcome dry = run(isolate() + data + " --dry-run");
  EXPECT_EQ(dry.exit_code, 0) << dry.text;
  for (const char* part : {"runs for ", " for the slope", "time       about", "bare forward passes"}) EXPECT_NE(dry.text.find(part), std::string::npos) << dry.text;
  const Outcome dry_json = run(isolate() + data + " --dry-run --json -q");
  const nlohmann::json predicted = json_of(dry_json);
  EXPECT_GT(predicted.at("predicted").at("seconds").get<double>(), 0);
  EXPECT_FALSE(exists("no.h5"));
  const Outcome o = run(isolate() + "--data " + file("scores.txt") + " --json -q -o " + file("json.h5"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const nlohmann::json j = json_of(o);
  EXPECT_EQ(j.at("runs"), predicted.at("runs"));
  EXPECT_EQ(j.at("units").size(), predicted.at("units").get<std::size_t>());
  std::size_t n = 0;
  for (const nlohmann::json& d : j.at("decades")) n += d.at("pairs").get<std::size_t>();
  EXPECT_EQ(n, j.at("runs").get<std::size_t>()) << "every run stands in one decade";
  EXPECT_GT(j.at("slope").at("K").at("value").get<double>(), 0);
  EXPECT_GT(j.at("farthest").at("logit_kl").get<double>(), 0);

  const std::string other = "kvsens isolate " + model() + "--sens " + file("r.h5") + " --data " + file("scores.txt") + " --above ";
  // One layer, that with the largest score: its units are taken up, no others.
  const sens::SensResult scored = artifacts::read_sens_file(file("r.h5"));
  const auto three_bits = [&](std::size_t u) { return scored.scores.at("fisher_softmax").mean[scored.index(u, scheme(scored, "int3.token.g"), 0)]; };
  std::size_t largest = 0;
  for (std::size_t u = 0; u < scored.units.size(); ++u)
    if (three_bits(u) > three_bits(largest)) largest = u;
  const int layer = scored.units[largest].layer;
  const Outcome one = run(other + limit() + fmt::format(" --layers {} -o ", layer) + file("one.h5"));
  ASSERT_EQ(one.exit_code, 0) << one.text;
  const sens::SensResult read = artifacts::read_sens_file(file("one.h5"));
  std::size_t n_taken = 0;
  for (std::size_t u = 0; u < read.units.size(); ++u) {
    n_taken += read.isolated->taken_up[u];
    EXPECT_TRUE(read.units[u].layer == layer || read.isolated->taken_up[u] == 0) << u;
  }
  EXPECT_GE(n_taken, 1u);
  // Nothing above the limit: only the slope is measured, and no score changes.
  const sens::ScoreTable& table = read.scores.at("fisher_softmax");
  double most = 0;
  for (const double x : table.mean)
    if (x > most) most = x;
  const Outcome none = run(other + fmt::format("{}", most) + " -o " + file("none.h5"));
  ASSERT_EQ(none.exit_code, 0) << none.text;
  EXPECT_NE(none.text.find("no score is replaced"), std::string::npos) << none.text;
  const std::string plan = " --budget 9 --context 4096 -o ";
  ASSERT_EQ(run("kvplan --sens " + file("none.h5") + plan + file("none.json")).exit_code, 0);
  ASSERT_EQ(run("kvplan --sens " + file("r.h5") + plan + file("plain.json")).exit_code, 0);
  EXPECT_EQ(artifacts::read_plan(file("none.json")).summary.predicted->score, artifacts::read_plan(file("plain.json")).summary.predicted->score);
  // No slope without options below the limit, and nothing at all far above.
  for (const auto& [above, part] : {std::pair{"1e-12", "a slope needs 3"}, {"1e9", "nothing to measure"}}) {
    const Outcome refused = run(other + above + " -o " + file("no.h5"));
    EXPECT_EQ(refused.exit_code, 6) << refused.text;
    EXPECT_NE(refused.text.find(part), std::string::npos) << refused.text;
  }
  EXPECT_FALSE(exists("no.h5"));
}

TEST_F(Isolate, Refusals) {
  const std::string data = "--data " + file("scores.txt") + " -o " + file("no.h5"), plain = "isolate " + model();
  expect(plain + data, 2, "needs --sens");
  for (const char* above : {"0", "-1", "x", "nan"}) expect(plain + "--sens " + file("r.h5") + " --above " + above + " " + data, 2, "--above");
  expect(plain + "--sens " + file("r.h5") + " --above " + limit() + " --layers 99 " + data, 2, "no attention layer 99");
  expect(plain + "--sens " + file("r.h5") + " --metric fisher " + data, 2, "the scores hold attn_out, fisher_softmax");
  expect(plain + "--sens " + file("r.h5") + " --metric attn_out " + data, 2, "is not in nats");
  expect(plain + "--sens " + file("truth.h5") + " --metric logit_kl " + data, 2, "nothing to replace");
  expect(plain + "--sens " + file("absent.h5") + " " + data, 3, "absent.h5");
  expect(plain + "--sens " + file("stats.h5") + " " + data, 4, "kvcalib.stats");
  expect("isolate --model " + file("other") + " --threads 1 --seq-len 256 --sens " + file("r.h5") + " " + data, 5, "r.h5");
  // Behind 4 sinks and a window of 32 nothing of 36 tokens is coded.
  expect("isolate --model " + file("m") + " --threads 1 --seq-len 36 --num-samples 2 --sens " + file("r.h5") + " --above " + limit() + " " + data, 6,
         "nothing of it would be coded");
  expect(plain + "--sens " + file("r.h5") + " --data " + file("scores.txt") + " -o " + file("scores.txt"), 2, "scores.txt");
  EXPECT_FALSE(exists("no.h5"));
  // The text of the statistics is allowed, as for the scores, and named.
  const Outcome seen = run(isolate() + "--data " + file("a.txt") + " -o " + file("seen.h5"));
  EXPECT_EQ(seen.exit_code, 0) << seen.text;
  EXPECT_NE(seen.text.find("on the text of the statistics"), std::string::npos) << seen.text;
}

}  // namespace
}  // namespace calib
