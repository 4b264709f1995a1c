// What must not change, and what must, on a trained model: outliers put into its keys, heads and documents in another order.

#include <sys/wait.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "libcalib/artifacts/stats_file.h"
#include "libcalib/weights/checkpoint.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"

namespace calib {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const std::string kTexts = std::string(CALIB_SOURCE_DIR) + "/datasets/";

void run(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string text;
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) text.append(buffer.data(), n);
  const int status = pclose(pipe);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command << "\n" << text;
}
/// One thread: several threads of a program wait for each other without pause, which a machine with other tests on it pays for.
std::string program(const std::string& name) { return std::string(CALIB_BIN_DIR) + "/" + name + " -q --threads 1 "; }

double score(const sens::SensResult& r, const std::string& metric, int layer, Side side, const std::string& scheme) {
  for (std::size_t u = 0; u < r.units.size(); ++u)
    for (std::size_t s = 0; s < r.schemes.size(); ++s)
      if (r.units[u].layer == layer && r.units[u].side == side && r.schemes[s] == scheme) return r.scores.at(metric).mean[r.index(u, s, 0)];
  ADD_FAILURE() << "no score of layer " << layer << " " << scheme;
  return 0;
}

/// One channel's statistics are those of another, its values times `factor`, a power of two.
void expect_scaled(const stats::TensorStats& got, int head, const stats::TensorStats& want, int c, double factor, const std::string& what) {
  const std::size_t i = got.index(head, c);
  const stats::Moments &a = got.moments[i], &b = want.moments[i];
  const auto near = [&](double x, double y, const char* part) {
    ASSERT_NEAR(x, y, 1e-12 * std::fabs(y)) << what << " " << part << " head " << head << " channel " << c;
  };
  ASSERT_EQ(a.n, b.n);
  near(a.mean, factor * b.mean, "mean");
  near(a.m2, std::pow(factor, 2) * b.m2, "m2");
  near(a.m4, std::pow(factor, 4) * b.m4, "m4");
  near(got.min(head, c), factor * want.min(head, c), "min");
  near(got.max(head, c), factor * want.max(head, c), "max");
  for (const double p : {0.01, 0.5, 0.99}) near(got.abs_quantile(head, c, p), factor * want.abs_quantile(head, c, p), "quantile");
}

/// Factors are powers of two, so that nothing but the scaled channels themselves changes, down to the last bit.
TEST(TrainedModel, InjectedOutliersAreSeenScoredAndPlannedFor) {
  CALIB_SMOLLM2(model);
  const test::TempFolder folder;
  constexpr double kFactor = 32;
  const std::vector<int> changed = {3, 12, 15};
  run(std::string(CALIB_SOURCE_DIR) + "/scripts/inject_outliers --model " + model + " -o " + folder.file("m") + " --layers 3,12,15 --pairs 2 --factors 32");
  const json record = json::parse(test::read_file(folder.file("m/outliers.json")))["outliers"];
  const auto factor = [&](int layer, int head, int channel) {
    for (const json& o : record)
      if (o["layer"] == layer && o["kv_head"] == head && (o["channels"][0] == channel || o["channels"][1] == channel)) return kFactor;
    return 1.0;
  };
  const std::string text = " --seq-len 384 --num-samples 2 --data " + kTexts;
  for (const auto& [name, path] : {std::pair<std::string, std::string>("plain", model), {"loud", folder.file("m")}}) {
    run(program("kvcalib") + "--model " + path + text + "calibrate.txt -o " + folder.file(name + ".h5"));
    run(program("kvsens") + "--model " + path + text + "measure.txt --stats " + folder.file(name + ".h5") +
        " --window 0 --metric attn_kl,attn_out --candidates "
        "int8.token.g:int8.token.g,int4.token.g:int8.token.g,int4.token.g.smooth:int8.token.g,int4.channel.g32:int8.token.g,"
        "int4.channel.g32.pre:int8.token.g -o " +
        folder.file(name + "_sens.h5"));
  }

  // The function: the same likelihood of the text, and the same attention.
  const artifacts::StatsReader plain(folder.file("plain.h5")), loud(folder.file("loud.h5"));
  EXPECT_EQ(plain.reference().nll_sum, loud.reference().nll_sum);
  // Statistics: the chosen channels times their factor, queries over it, all else as it was.
  for (std::size_t l = 0; l < plain.n_layers(); ++l) {
    const stats::LayerStats a = plain.layer(l), b = loud.layer(l);
    const LayerGeometry& g = a.geometry();
    EXPECT_EQ(a.attention.sum_state(), b.attention.sum_state()) << l;
    const int group = g.n_q_heads / g.n_kv_heads;
    for (int h = 0; h < g.n_kv_heads; ++h)
      for (int c = 0; c < g.head_dim; ++c) {
        const double f = factor(g.index, h, c);
        const std::string layer = "layer " + std::to_string(l);
        expect_scaled(b.k_pre.body, h, a.k_pre.body, c, f, layer + " k_pre");
        expect_scaled(b.k_post.body, h, a.k_post.body, c, f, layer + " k_post");
        expect_scaled(b.k_post.sink, h, a.k_post.sink, c, f, layer + " k_post sinks");
        expect_scaled(b.v.body, h, a.v.body, c, 1, layer + " v");
        for (int q = h * group; q < (h + 1) * group; ++q) expect_scaled(b.q_post.body, q, a.q_post.body, c, 1 / f, layer + " q_post");
        const std::size_t pair = static_cast<std::size_t>(h * g.head_dim / 2 + c % (g.head_dim / 2));
        EXPECT_EQ(b.pair_absmax[pair], static_cast<float>(f) * a.pair_absmax[pair]);
      }
  }

  // Scores: a range per channel does not care, one per token does, factors bring it back.
  const sens::SensResult before = artifacts::read_sens_file(folder.file("plain_sens.h5")), after = artifacts::read_sens_file(folder.file("loud_sens.h5"));
  for (int l = 0; l < before.model.n_layers; ++l) {
    const bool is_changed = std::find(changed.begin(), changed.end(), l) != changed.end();
    for (const char* metric : {"attn_kl", "attn_out"}) {
      const auto ratio = [&](const char* scheme) { return score(after, metric, l, Side::kK, scheme) / score(before, metric, l, Side::kK, scheme); };
      EXPECT_EQ(ratio("int4.channel.g32"), 1) << metric << " layer " << l;
      EXPECT_EQ(ratio("int4.channel.g32.pre"), 1) << metric << " layer " << l;
      EXPECT_EQ(score(after, metric, l, Side::kV, "int8.token.g"), score(before, metric, l, Side::kV, "int8.token.g"));
      if (!is_changed) {
        for (const char* scheme : {"int8.token.g", "int4.token.g", "int4.token.g.smooth"}) EXPECT_EQ(ratio(scheme), 1) << metric << " layer " << l << " " << scheme;
        continue;
      }
      EXPECT_GT(ratio("int8.token.g"), 10) << metric << " layer " << l;
      EXPECT_GT(ratio("int4.token.g"), 8) << metric << " layer " << l;
      // Factors are the root of the range: 32 becomes 5.7.
      EXPECT_LT(ratio("int4.token.g.smooth"), 0.5 * ratio("int4.token.g")) << metric << " layer " << l;
      EXPECT_LT(score(after, metric, l, Side::kK, "int4.token.g.smooth"), 0.5 * score(after, metric, l, Side::kK, "int4.token.g")) << metric << " layer " << l;
    }
  }

  // Plans: what was best per token moves to channels where it may, else to `smooth`, and says why.
  const auto planned = [&](const std::string& name, const std::string& allowed, const char* budget) {
    const std::string path = folder.file(name + ".json");
    run(program("kvplan") + "--stats " + folder.file(name + ".h5") + " --sens " + folder.file(name + "_sens.h5") + " --metric attn_out --budget " + budget +
        " --allow-k " + allowed + " -o " + path);
    return artifacts::read_plan(path);
  };
  const auto outliers = [](const plan::UnitPlan& unit) {
    for (const plan::Reason& r : unit.why)
      if (r.rule == "outlier_ratio") return r;
    ADD_FAILURE() << "no reason about outliers";
    return plan::Reason{};
  };
  struct Row { const char *allowed, *budget, *from, *to, *remedy; std::vector<int> layers; };
  for (const Row& row : {Row{"int8.token.g,int4.channel.g32", "8.3", "int8.token.g", "int4.channel.g32", "ranges per channel keep them apart", {3, 12, 15}},
                         Row{"int4.token.g,int4.token.g.smooth", "6.6", "int4.token.g", "int4.token.g.smooth", "`smooth` shrink them", {15}}}) {
    const plan::Plan quiet_plan = planned("plain", row.allowed, row.budget), loud_plan = planned("loud", row.allowed, row.budget);
    for (const int l : row.layers) {
      const plan::UnitPlan &from = quiet_plan.layers[static_cast<std::size_t>(l)].k, &to = loud_plan.layers[static_cast<std::size_t>(l)].k;
      EXPECT_EQ(kvrt::to_string(from.scheme), row.from) << l;
      EXPECT_EQ(kvrt::to_string(to.scheme), row.to) << l;
      EXPECT_THAT(outliers(from).text, HasSubstr("no channel stands out")) << l;
      EXPECT_THAT(outliers(to).text, HasSubstr(row.remedy)) << l;
      EXPECT_GT(outliers(to).numbers[0].second, 6) << l;
      EXPECT_GT(outliers(to).numbers[0].second, 4 * outliers(from).numbers[0].second) << l;
    }
  }
}

/// A copy of a GGUF model whose layers have their heads in another order: KV heads by `kv`, the query heads of each group by `within`.
/// Rows of the projections and columns of the output projection move as stored.
void permute_heads(const std::string& model, const std::string& copy, int head_dim, const std::vector<std::size_t>& kv, const std::vector<std::size_t>& within) {
  std::filesystem::copy_file(model, copy);
  std::vector<std::size_t> queries;
  for (const std::size_t group : kv)
    for (const std::size_t r : within) queries.push_back(group * within.size() + r);
  const weights::Checkpoint checkpoint = weights::Checkpoint::open(model);
  std::ifstream in(model, std::ios::binary);
  std::fstream out(copy, std::ios::binary | std::ios::in | std::ios::out);
  int n_changed = 0;
  for (const weights::TensorInfo& t : checkpoint.tensors()) {
    const bool q = t.name.ends_with(".attn_q.weight"), output = t.name.ends_with(".attn_output.weight");
    if (!q && !output && !t.name.ends_with(".attn_k.weight") && !t.name.ends_with(".attn_v.weight")) continue;
    const std::vector<std::size_t>& order = q || output ? queries : kv;
    // Runs that move together: one of a projection, one a row of the output projection.
    const auto n_runs = output ? static_cast<std::size_t>(t.shape[0]) : 1, run_bytes = t.size_bytes / n_runs, head_bytes = run_bytes / order.size();
    ASSERT_EQ(head_bytes * order.size(), run_bytes) << t.name;
    ASSERT_EQ(t.shape[output ? 1 : 0], static_cast<std::int64_t>(order.size()) * head_dim) << t.name;
    std::vector<char> old(t.size_bytes), moved(t.size_bytes);
    in.seekg(static_cast<std::streamoff>(t.offset)).read(old.data(), static_cast<std::streamsize>(old.size()));
    for (std::size_t r = 0; r < n_runs; ++r)
      for (std::size_t h = 0; h < order.size(); ++h) std::memcpy(&moved[r * run_bytes + h * head_bytes], &old[r * run_bytes + order[h] * head_bytes], head_bytes);
    out.seekp(static_cast<std::streamoff>(t.offset)).write(moved.data(), static_cast<std::streamsize>(moved.size()));
    ++n_changed;
  }
  ASSERT_TRUE(in.good() && out.good());
  ASSERT_GT(n_changed, 0);
}

TEST(TrainedModel, HeadsInAnotherOrderGiveTheSameUnits) {
  CALIB_SMOLLM2(model);
  const test::TempFolder folder;
  const std::vector<std::size_t> kv = {2, 0, 1}, within = {1, 2, 0};
  permute_heads(model, folder.file("permuted.gguf"), 64, kv, within);
  const std::string text = " --seq-len 256 --num-samples 2 --data " + kTexts;
  for (const auto& [name, path] : {std::pair<std::string, std::string>("plain", model), {"permuted", folder.file("permuted.gguf")}}) {
    run(program("kvcalib") + "--model " + path + text + "calibrate.txt -o " + folder.file(name + ".h5"));
    run(program("kvsens") + "--model " + path + text + "measure.txt --stats " + folder.file(name + ".h5") +
        " --window 0 --layers 0,14,29 --metric fisher_vec,attn_kl,attn_out --candidates "
        "int4.token.g:int4.token.g,int4.token.g.center.had:int4.token.g,int4.channel.g32.pre:int4.token.g -o " +
        folder.file(name + "_sens.h5"));
  }
  // Sums over heads come in another order: rounding of the output projection, passed on by the layers.
  constexpr double kRounding = 1e-3;
  const artifacts::StatsReader plain(folder.file("plain.h5")), permuted(folder.file("permuted.h5"));
  ASSERT_EQ(plain.header().model.layers[0].n_kv_heads, 3);
  for (std::size_t l = 0; l < plain.n_layers(); ++l) {
    const stats::LayerStats a = plain.layer(l), b = permuted.layer(l);
    const auto compare = [&](const stats::TensorStats& x, int head, const stats::TensorStats& y, int old_head, const char* what) {
      const double size = y.head_absmax(old_head);
      for (int c = 0; c < 64; ++c) {
        ASSERT_NEAR(x.mean(head, c), y.mean(old_head, c), kRounding * size) << what << " layer " << l << " head " << head;
        ASSERT_NEAR(x.absmax(head, c), y.absmax(old_head, c), kRounding * size) << what << " layer " << l << " head " << head;
        const double m2 = y.moments[y.index(old_head, c)].m2;
        ASSERT_NEAR(x.moments[x.index(head, c)].m2, m2, kRounding * m2) << what << " layer " << l << " head " << head;
      }
    };
    for (int h = 0; h < 3; ++h) {
      const int old_kv = static_cast<int>(kv[static_cast<std::size_t>(h)]);
      compare(b.k_pre.body, h, a.k_pre.body, old_kv, "k_pre");
      compare(b.k_post.body, h, a.k_post.body, old_kv, "k_post");
      compare(b.v.body, h, a.v.body, old_kv, "v");
      for (int r = 0; r < 3; ++r) compare(b.q_post.body, 3 * h + r, a.q_post.body, 3 * old_kv + static_cast<int>(within[static_cast<std::size_t>(r)]), "q_post");
      const std::vector<double> m = a.query_moment.matrix(old_kv), n = b.query_moment.matrix(h);
      double trace = 0;
      for (std::size_t c = 0; c < 64; ++c) trace += m[65 * c];
      for (std::size_t i = 0; i < m.size(); ++i) ASSERT_NEAR(n[i], m[i], kRounding * trace) << l;
    }
  }
  const sens::SensResult x = artifacts::read_sens_file(folder.file("plain_sens.h5")), y = artifacts::read_sens_file(folder.file("permuted_sens.h5"));
  for (const auto& [metric, table] : x.scores)
    for (std::size_t i = 0; i < table.mean.size(); ++i) {
      if (std::isnan(table.mean[i])) continue;
      // A value next to a boundary takes the other code: a few in a thousand, each a step of its channel.
      // The Fisher score also draws labels: other rounding of the logits moves a draw on the edge between two words to the other one, which
      // alone changes a score of two short documents by a few percent (as it does on a CPU of another kind).
      const double bound = metric == "fisher_vec" ? 0.1 : 0.01;
      EXPECT_NEAR(y.scores.at(metric).mean[i], table.mean[i], bound * table.mean[i]) << metric << " " << i;
    }
}

/// Four documents of the text, as JSONL rows in the given order.
void write_documents(const std::string& path, const std::vector<std::size_t>& order) {
  const std::string text = test::read_file(kTexts + "calibrate.txt");
  std::string rows;
  for (const std::size_t i : order) rows += json({{"text", text.substr(3000 * i, 700 + 300 * i)}}).dump() + "\n";
  test::write_file(path, rows);
}

TEST(TrainedModel, DocumentsInAnyOrderAndInPartsGiveTheSame) {
  CALIB_SMOLLM2(model);
  const test::TempFolder folder;
  write_documents(folder.file("all.jsonl"), {0, 1, 2, 3});
  write_documents(folder.file("turned.jsonl"), {2, 3, 1, 0});
  write_documents(folder.file("first.jsonl"), {0, 1});
  write_documents(folder.file("second.jsonl"), {2, 3});
  for (const std::string name : {"all", "turned", "first", "second"}) {
    run(program("kvcalib") + "--model " + model + " --seq-len 512 --data " + folder.file(name + ".jsonl") + " -o " + folder.file(name + ".h5"));
    run(program("kvsens") + "--model " + model + " --seq-len 512 --data " + folder.file(name + ".jsonl") +
        " --window 0 --sinks 4 --rows 1048576 --layers 1,20 --metric attn_kl,attn_out --candidates int4.token.g,int4.channel.g32.pre -o " +
        folder.file(name + "_sens.h5"));
  }
  const artifacts::StatsReader all(folder.file("all.h5")), turned(folder.file("turned.h5")), first_half(folder.file("first.h5")),
      second_half(folder.file("second.h5"));
  ASSERT_EQ(all.header().data.n_documents, 4);
  for (const bool in_parts : {false, true}) {
    for (std::size_t l = 0; l < all.n_layers(); ++l) {
      const stats::LayerStats a = all.layer(l);
      stats::LayerStats b = in_parts ? first_half.layer(l) : turned.layer(l);
      if (in_parts) b.merge(second_half.layer(l));
      EXPECT_EQ(a.pair_absmax, b.pair_absmax) << l;
      for (const auto& [x, y] : {std::pair(&a.k_pre, &b.k_pre), {&a.k_post, &b.k_post}, {&a.v, &b.v}, {&a.q_post, &b.q_post}})
        for (const auto& [s, t] : {std::pair(&x->body, &y->body), {&x->sink, &y->sink}})
          for (std::size_t i = 0; i < s->n_channels(); ++i) {
            ASSERT_EQ(s->moments[i].n, t->moments[i].n);
            ASSERT_EQ(s->extrema[i].min, t->extrema[i].min) << l;
            ASSERT_EQ(s->extrema[i].max, t->extrema[i].max) << l;
            ASSERT_TRUE(s->sketches[i] == t->sketches[i]) << l;
            const double size = s->moments[i].m2 + static_cast<double>(s->moments[i].n) * s->moments[i].mean * s->moments[i].mean;
            ASSERT_NEAR(s->moments[i].mean, t->moments[i].mean, 1e-6 * std::sqrt(size / static_cast<double>(s->moments[i].n)));  // fp32 tiles end elsewhere
            ASSERT_NEAR(s->moments[i].m2, t->moments[i].m2, 1e-6 * size) << l;
          }
      const std::vector<double> m = a.query_moment.matrix(0), n = b.query_moment.matrix(0);
      for (std::size_t i = 0; i < m.size(); ++i) ASSERT_NEAR(n[i], m[i], 1e-6 * std::sqrt(m[i % 64 * 65] * m[i / 64 * 65])) << l;
    }
  }
  const sens::SensResult whole = artifacts::read_sens_file(folder.file("all_sens.h5")), order = artifacts::read_sens_file(folder.file("turned_sens.h5")),
                         first = artifacts::read_sens_file(folder.file("first_sens.h5")), second = artifacts::read_sens_file(folder.file("second_sens.h5"));
  const auto rows = [](const sens::SensResult& r) { return static_cast<double>(r.data.n_tokens - r.n_sinks * r.data.n_documents); };
  for (const int l : {1, 20})
    for (const char* scheme : {"int4.token.g", "int4.channel.g32.pre"}) {
      const double kl = score(whole, "attn_kl", l, Side::kK, scheme), out = score(whole, "attn_out", l, Side::kK, scheme);
      EXPECT_NEAR(score(order, "attn_kl", l, Side::kK, scheme), kl, 1e-9 * kl);
      EXPECT_NEAR(score(order, "attn_out", l, Side::kK, scheme), out, 1e-9 * out);
      const double parts = rows(first) * score(first, "attn_kl", l, Side::kK, scheme) + rows(second) * score(second, "attn_kl", l, Side::kK, scheme);
      EXPECT_NEAR(parts / rows(whole), kl, 1e-9 * kl);
    }
}

}  // namespace
}  // namespace calib
