#include "libcalib/sens/sweep.h"

#include <cmath>

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "libcalib/quant/codebook_fit.h"
#include "libcalib/sens/joint_run.h"
#include "libcalib/sens/metrics.h"
#include "tests/sens/sens_fixture.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

using test_fixture::Grid;
using test_fixture::OpenModel;
using test_fixture::random_documents;
using test_fixture::score;
using test_fixture::sweep;

SweepOptions options_of(std::vector<std::string> metrics, std::vector<std::int64_t> windows, std::int64_t sinks = 4) {
  SweepOptions o;
  o.metrics = std::move(metrics);
  o.windows = std::move(windows);
  o.n_sinks = sinks;
  o.rows_per_document = 1 << 20;  // every row: no sampling
  return o;
}

TEST(Sweep, LeavesNothingUnscoredAndMarksWhatIsInvalid) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const SensResult r = sweep(m.model, random_documents(3, 80, 256), {{"int4.token.g8", "int4.channel.g32"}, {"int4.token.g8"}, {}},
                             options_of({"fisher_softmax", "fisher_vec", "fisher", "attn_kl", "attn_out"}, {0, 16}));
  EXPECT_EQ(r.units.size(), static_cast<std::size_t>(2 * m.model.n_layers()));
  for (const auto& [name, table] : r.scores)
    for (std::size_t u = 0; u < r.units.size(); ++u)
      for (std::size_t s = 0; s < r.schemes.size(); ++s)
        for (std::size_t w = 0; w < 2; ++w) {
          const std::size_t i = r.index(u, s, w);
          EXPECT_EQ(std::isfinite(table.mean[i]), r.valid[u * r.schemes.size() + s] == 1) << name;
          if (r.valid[u * r.schemes.size() + s] == 0) continue;
          EXPECT_TRUE(std::isfinite(table.se[i])) << name;
          EXPECT_LE(table.p99[i], table.max[i]) << name;
          if (name == "attn_kl" && r.units[u].side == Side::kV) EXPECT_EQ(table.mean[i], 0);
          else EXPECT_GT(table.mean[i], 0) << name;
        }
}

// A window as long as the document leaves only the BF16 rounding of exact segments, the same for every scheme of a frame.
TEST(Sweep, FullWindowScoresOnlyTheRounding) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(2, 60, 256);
  const SensResult r = sweep(m.model, documents, {{"bf16", "int2.token.g", "int8.token.g"}, {"bf16", "int2.token.g"}, {}},
                             options_of({"fisher_vec", "attn_kl", "attn_out"}, {0, 200}, 0));
  for (int l = 0; l < m.model.n_layers(); ++l)
    for (const char* metric : {"fisher_vec", "attn_kl", "attn_out"}) {
      const double rounding = score(r, metric, l, Side::kK, "bf16", 1);
      EXPECT_GT(rounding, 0);
      EXPECT_DOUBLE_EQ(score(r, metric, l, Side::kK, "int2.token.g", 1), rounding) << metric;
      EXPECT_GT(score(r, metric, l, Side::kK, "int2.token.g", 0), 100 * rounding) << metric;
      // Coded with W = 0 or exact: a bf16 key is the same key. fisher sums the parts' squares apart, and here only one part is there.
      EXPECT_NEAR(score(r, metric, l, Side::kK, "bf16", 0), rounding, 1e-3 * rounding) << metric;
    }
}

// METHODS.md 4.5: of two codebooks of 2 bits the one that loses less attention on the text of the run is scored and stored.
TEST(Sweep, TheBetterOfTwoCodebooksIsKept) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(1, 48, 256);
  const std::vector<float> good = quant::stored_codebook({-0.8, -0.3, 0.3, 0.8}), bad = quant::stored_codebook({-0.02, -0.01, 0.01, 0.02});
  struct Run {
    SensResult result;
    std::vector<std::string> notes;
  };
  const auto run = [&](const std::vector<float>& first, const std::vector<float>& second, bool judge, const std::vector<std::string>& metrics) {
    const ParamsProvider params = [&](std::size_t, Side, const kvrt::Scheme&, std::int64_t) {
      quant::SchemeParams p;
      p.codebook = first, p.codebook_qnorm = second;
      return p;
    };
    SweepOptions options = options_of(metrics, {0, 8});
    options.judge_codebooks = judge;
    Run out;
    out.result.model = m.model.identity();
    LogSink log;
    log.note = [&](const std::string& text) { out.notes.push_back(text); };
    ThreadPool pool(1);
    lay_out_grid({"custom", {"int4.token.g8", "nuq2.token.g"}, {"nuq2.token.g"}}, {0, 3}, &out.result, {});
    run_sweep(m.model, documents, options, params, pool, &out.result, log);
    return out;
  };
  const auto stored = [](const Run& r, const char* key) { return r.result.params.at(key).at(0).values; };
  for (const std::vector<std::string>& metrics : {std::vector<std::string>{"fisher_vec", "attn_kl", "attn_out"}, {"attn_out", "logit_kl"}}) {
    const Run alone = run(good, {}, true, metrics), kept = run(bad, good, true, metrics), left = run(good, bad, true, metrics);
    for (const Run* r : {&kept, &left}) {
      EXPECT_EQ(stored(*r, "00/k/nuq2.token.g"), good);
      EXPECT_EQ(stored(*r, "03/v/nuq2.token.g"), good);
      for (const auto& [name, table] : alone.result.scores) {
        ASSERT_EQ(r->result.scores.at(name).mean.size(), table.mean.size());
        for (std::size_t i = 0; i < table.mean.size(); ++i)
          EXPECT_TRUE(r->result.scores.at(name).mean[i] == table.mean[i] || std::isnan(table.mean[i])) << name << " " << i;
      }
    }
    EXPECT_TRUE(alone.notes.empty());
    ASSERT_EQ(kept.notes.size(), 1u);
    EXPECT_NE(kept.notes[0].find("4 of 4"), std::string::npos) << kept.notes[0];
    EXPECT_NE(left.notes.at(0).find("0 of 4"), std::string::npos);
  }
  // Nothing to judge by, or text that the codebooks were fitted on.
  EXPECT_EQ(stored(run(bad, good, true, {"fisher_vec"}), "00/k/nuq2.token.g"), bad);
  EXPECT_EQ(stored(run(bad, good, false, {"attn_kl"}), "00/k/nuq2.token.g"), bad);
}

TEST(MeasureIsolated, IsLogitKlOfTheCellsThatAreAskedFor) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(3, 80, 256);
  SensResult r = sweep(m.model, documents, {{"int4.token.g8", "int2.token.g", "int4.channel.g32"}, {"int4.token.g8", "int2.token.g"}, {}},
                       options_of({"logit_kl"}, {0, 16}));
  const ScoreTable truth = r.scores.at("logit_kl");
  std::vector<std::uint8_t> cells(truth.mean.size(), 0);
  std::size_t n = 0;
  for (std::size_t i = 0; i < cells.size(); ++i)
    if (std::isfinite(truth.mean[i]) && i % 3 != 1) cells[i] = 1, ++n;
  ASSERT_GT(n, 10u);
  ThreadPool pool(1);
  const ScoreTable got = measure_isolated(m.model, documents, r, cells, std::int64_t{1} << 30, pool);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (!cells[i]) {
      EXPECT_TRUE(std::isnan(got.mean[i]) && std::isnan(got.se[i])) << i;
      continue;
    }
    EXPECT_NEAR(got.mean[i], truth.mean[i], 1e-9 * truth.mean[i]) << i;
    EXPECT_NEAR(got.se[i], truth.se[i], 1e-9 * truth.se[i]) << i;
  }
  // Passes: one, and for each cell 1.2 times the share of the layers from its own up.
  double passes = 1;
  for (std::size_t i = 0; i < cells.size(); ++i)
    if (cells[i]) passes += 1.2 * (1.0 - static_cast<double>(r.units[i / (2 * r.schemes.size())].layer) / static_cast<double>(m.model.n_layers()));
  EXPECT_NEAR(isolated_forward_passes(r, cells), passes, 1e-9 * passes);

  // Constants come from the grid alone.
  r.schemes[1] = "nuq2.token.g";
  test::expect_error([&] { measure_isolated(m.model, documents, r, cells, std::int64_t{1} << 30, pool); }, ErrorKind::kMismatch,
                     {"layer 0", "nuq2.token.g", "run kvsens again"});
}

// SN-05: errors past the border of a sliding window are like those before it, in layers with and without one.
TEST(Sweep, BucketsBeyondTheSlidingWindow) {
  test::TinyModel tiny = test::make_tiny_model("m-gemma3");
  tiny.sliding_window = 256;
  OpenModel m(tiny);
  const SensResult r = sweep(m.model, random_documents(1, 1024, 256), {{"int8.token.g"}, {"int8.token.g"}, {}},
                             options_of({"fisher_vec", "attn_kl", "attn_out"}, {0}));
  ASSERT_EQ(r.n_buckets, 3);  // 0-256, 256-512, 512-1024
  for (const auto& [name, table] : r.scores)
    for (std::size_t u = 0; u < r.units.size(); ++u) {
      if (name == "attn_kl" && r.units[u].side == Side::kV) continue;
      const double* bucket = table.by_bucket.data() + r.index(u, 0, 0) * 3;
      EXPECT_GT(bucket[0], 0);
      for (const int late : {1, 2}) {
        EXPECT_GT(bucket[late], 0) << name << " unit " << u;
        EXPECT_LE(bucket[late], 2 * bucket[0]) << name << " unit " << u;
      }
    }
}

// Keys only, and a gain that grows with the error: none to speak of at 8 bits.
TEST(Sweep, SoftmaxGainScalesTheWholeKeyTable) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const SensResult r = sweep(m.model, random_documents(2, 60, 256), {{"int2.token.g", "int8.token.g"}, {"int2.token.g"}, {}},
                             options_of({"fisher_softmax", "fisher_vec", "fisher_dir"}, {0}));
  EXPECT_EQ(r.scores.size(), 3u);
  const ScoreTable &gained = r.scores.at("fisher_softmax"), &linear = r.scores.at("fisher_vec");
  for (std::size_t u = 0; u < r.units.size(); ++u)
    for (std::size_t s = 0; s < r.schemes.size(); ++s) {
      if (r.valid[u * r.schemes.size() + s] == 0) continue;
      const std::size_t i = r.index(u, s, 0);
      const double together = coherence(linear.mean[i], r.scores.at("fisher_dir").mean[i], 4), gain = gained.mean[i] / linear.mean[i] / together;
      if (r.units[u].side == Side::kV) EXPECT_NEAR(gain, 1.0, 1e-12);
      else if (r.schemes[s] == "int8.token.g") EXPECT_NEAR(gain, 1.0, 0.02);
      else EXPECT_GT(std::fabs(gain - 1.0), 1e-3);
      const std::pair<const std::vector<double>*, const std::vector<double>*> parts[] = {
          {&gained.se, &linear.se}, {&gained.p99, &linear.p99}, {&gained.max, &linear.max}, {&gained.worst_decile, &linear.worst_decile}};
      for (const auto& [a, b] : parts) {
        if (together == 1 || a != &gained.se) {
          EXPECT_NEAR((*a)[i], gain * together * (*b)[i], 1e-12 * (*a)[i]);
        }
      }
      for (std::size_t b = 0; b < static_cast<std::size_t>(r.n_buckets); ++b) {
        const double x = gained.by_bucket[i * r.n_buckets + b], y = linear.by_bucket[i * r.n_buckets + b];
        if (std::isfinite(y)) EXPECT_NEAR(x, gain * together * y, 1e-12 * x);
        else EXPECT_TRUE(std::isnan(x));
      }
    }
}

// With labels from the model, the square of all of a document's products at once is the KL at second order, whatever errors move
// together; fisher_vec leaves the products of different tokens out.
TEST(Sweep, FisherDirEstimatesTheLogitKl) {
  OpenModel m(test::make_tiny_model("m-llama"));
  SweepOptions options = options_of({"fisher_dir", "logit_kl"}, {0});
  options.n_draws = 128;
  const SensResult r = sweep(m.model, random_documents(8, 40, 256), {{"int4.token.g", "int8.token.g"}, {"int4.token.g"}, {}}, options);
  EXPECT_EQ(r.scores.size(), 2u);
  const ScoreTable &estimate = r.scores.at("fisher_dir"), &truth = r.scores.at("logit_kl");
  int n = 0;
  for (std::size_t i = 0; i < truth.mean.size(); ++i) {
    if (!std::isfinite(truth.mean[i])) continue;
    EXPECT_NEAR(estimate.mean[i], truth.mean[i], 0.25 * truth.mean[i]) << r.schemes[i % r.schemes.size()];  // 3 deviations of 1,024 squares, third order
    EXPECT_GT(estimate.se[i], 0);
    EXPECT_GE(estimate.worst_decile[i], estimate.mean[i]);
    for (int b = 0; b < r.n_buckets; ++b) EXPECT_TRUE(std::isnan(estimate.by_bucket[i * static_cast<std::size_t>(r.n_buckets) + static_cast<std::size_t>(b)]));
    ++n;
  }
  EXPECT_EQ(n, 3 * m.model.n_layers());
}

// The hidden state `lookahead` compares, made anew block by block.
TEST(Sweep, LookaheadComparesStatesAFewBlocksOn) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(2, 50, 256);
  ASSERT_GE(m.model.n_layers(), 2);
  for (const std::int64_t blocks : {std::int64_t{0}, m.model.n_layers()}) {
    SweepOptions options = options_of({"lookahead"}, {0});
    options.lookahead_blocks = blocks;
    const SensResult r = sweep(m.model, documents, {{"int4.token.g"}, {"int4.token.g", "int8.token.g"}, {}}, options);
    double squares = 0, norms = 0;
    ThreadPool pool(1);
    const c10::NoGradGuard no_grad;
    for (const text::Document& document : documents) {
      at::Tensor x = m.model.load_embedding()->lookup(document.ids), y = x;
      LayerChange change;
      change.v = UnitCandidate{0, quant::parse_scheme("int4.token.g"), {}};
      change.tiers = isolated_tiers(change.v->scheme, options.n_sinks, 0);
      const std::int64_t end = std::min(m.model.n_layers(), blocks + 1);
      for (std::int64_t l = 0; l < end; ++l) {
        const auto block = m.model.load_block(l);
        x = run_block(*block, x, nullptr, kQueryTile, pool);
        y = run_block(*block, y, l == 0 ? &change : nullptr, kQueryTile, pool);
      }
      const auto unit = [&](const at::Tensor& h) {
        return end == m.model.n_layers() ? m.model.load_head()->normalise(h) : h / h.square().mean(-1, true).sqrt();
      };
      const at::Tensor u = unit(x).slice(0, options.n_sinks), v = unit(y).slice(0, options.n_sinks);
      squares += (u - v).square().sum().item<double>();
      norms += u.square().sum().item<double>();
    }
    EXPECT_NEAR(score(r, "lookahead", 0, Side::kV, "int4.token.g", 0), squares / norms, 1e-4 * squares / norms);
    EXPECT_LT(score(r, "lookahead", 0, Side::kV, "int8.token.g", 0), 0.1 * score(r, "lookahead", 0, Side::kV, "int4.token.g", 0));
    EXPECT_GT(score(r, "lookahead", 0, Side::kK, "int4.token.g", 0), 0);
  }
}

TEST(Sweep, DocumentsMayComeInAnyOrderAndInParts) {
  OpenModel m(test::make_tiny_model("m-mistral"));
  auto documents = random_documents(4, 50, 256);
  documents[1].ids.resize(37);
  const Grid grid{{"int4.token.g", "int3.token.g.pre"}, {"int3.token.g"}, {}};
  const SweepOptions options = options_of({"attn_kl", "attn_out"}, {8});
  const SensResult all = sweep(m.model, documents, grid, options);
  std::reverse(documents.begin(), documents.end());
  const SensResult reversed = sweep(m.model, documents, grid, options);
  const SensResult first = sweep(m.model, {documents[0], documents[1]}, grid, options), second = sweep(m.model, {documents[2], documents[3]}, grid, options);
  const double rows_first = 2 * (50 - 4), rows_second = (37 - 4) + (50 - 4);
  for (int l = 0; l < m.model.n_layers(); ++l)
    for (const char* scheme : {"int4.token.g", "int3.token.g.pre"}) {
      const double want = score(all, "attn_kl", l, Side::kK, scheme);
      EXPECT_NEAR(score(reversed, "attn_kl", l, Side::kK, scheme), want, 1e-10 * want);
      const double parts = (rows_first * score(first, "attn_kl", l, Side::kK, scheme) + rows_second * score(second, "attn_kl", l, Side::kK, scheme)) /
                           (rows_first + rows_second);
      EXPECT_NEAR(parts, want, 1e-10 * want);
    }
}

TEST(Sweep, SameSeedSameNumbers) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(2, 64, 256);
  const Grid grid{{"int4.token.g"}, {"int4.token.g"}, {}};
  SweepOptions options = options_of({"fisher_vec", "attn_out"}, {16});
  options.rows_per_document = 20;
  const SensResult a = sweep(m.model, documents, grid, options), b = sweep(m.model, documents, grid, options);
  for (const auto& [name, table] : a.scores)
    for (std::size_t i = 0; i < table.mean.size(); ++i)
      if (std::isfinite(table.mean[i])) {
        EXPECT_EQ(table.mean[i], b.scores.at(name).mean[i]);
        EXPECT_EQ(table.se[i], b.scores.at(name).se[i]);
      }
  options.seed = 1;
  EXPECT_NE(score(sweep(m.model, documents, grid, options), "fisher_vec", 0, Side::kK, "int4.token.g"), score(a, "fisher_vec", 0, Side::kK, "int4.token.g"));
}

TEST(Sweep, SpilledStatesGiveTheSameNumbers) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const auto documents = random_documents(2, 64, 256);
  const Grid grid{{"int4.token.g"}, {"int4.token.g"}, {}};
  SweepOptions options = options_of({"fisher_vec"}, {16});
  const SensResult a = sweep(m.model, documents, grid, options);
  options.hidden_memory_bytes = 0;
  const SensResult b = sweep(m.model, documents, grid, options);
  for (int l = 0; l < m.model.n_layers(); ++l)
    EXPECT_EQ(score(a, "fisher_vec", l, Side::kV, "int4.token.g"), score(b, "fisher_vec", l, Side::kV, "int4.token.g"));
}

TEST(Sweep, RestrictedLayersMatchTheWholeGrid) {
  OpenModel m(test::make_tiny_model("m-qwen3"));
  const auto documents = random_documents(2, 40, 256);
  const SweepOptions options = options_of({"fisher_vec", "attn_kl"}, {8});
  const SensResult all = sweep(m.model, documents, {{"int4.token.g"}, {"int4.token.g"}, {}}, options);
  const SensResult one = sweep(m.model, documents, {{"int4.token.g"}, {"int4.token.g"}, {1}}, options);
  EXPECT_EQ(one.units.size(), 2u);
  for (const char* metric : {"fisher_vec", "attn_kl"})
    EXPECT_EQ(score(one, metric, 1, Side::kK, "int4.token.g"), score(all, metric, 1, Side::kK, "int4.token.g"));
}

TEST(Sweep, RefusesWhatItCannotScore) {
  OpenModel m(test::make_tiny_model("m-llama"));
  const Grid grid{{"int4.token.g"}, {}, {}};
  test::expect_error([&] { sweep(m.model, random_documents(1, 30, 256), grid, options_of({"mse"}, {0})); }, ErrorKind::kUsage, {"mse", "fisher_vec"});
  test::expect_error([&] { sweep(m.model, random_documents(1, 4, 256), grid, options_of({"attn_kl"}, {0})); }, ErrorKind::kInfeasible, {"4"});
  test::expect_error([&] { sweep(m.model, random_documents(1, 30, 256), {{"int4.token.g"}, {}, {99}}, options_of({"attn_kl"}, {0})); },
                     ErrorKind::kUsage, {"99"});
}

// SN-01: layers whose k_proj bias is huge are the ones that the score must find; with biases of 0 all layers are alike.
TEST(Sweep, HugeKeyBiasesAreFound) {
  OpenModel big(test::make_tiny_model("m-qwen2-big")), plain(test::make_tiny_model("m-qwen2"));
  const auto tokenizer = big.model.load_tokenizer();
  std::vector<text::Document> documents;
  const auto ids = tokenizer->encode(test::txt(2048));
  for (std::size_t begin = 0; begin + 256 <= ids.size(); begin += 256)
    documents.push_back({{ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.begin() + static_cast<std::ptrdiff_t>(begin + 256)}, 0});
  ASSERT_GE(documents.size(), 7u);
  const Grid grid{{"int4.token.g", "int3.token.g"}, {}, {}};
  SweepOptions options = options_of({"attn_kl"}, {128});
  options.rows_per_document = 128;
  const SensResult b = sweep(big.model, documents, grid, options), p = sweep(plain.model, documents, grid, options);
  for (const char* scheme : {"int4.token.g", "int3.token.g"}) {
    std::vector<double> with, without;
    for (int l = 0; l < 4; ++l) {
      with.push_back(score(b, "attn_kl", l, Side::kK, scheme));
      without.push_back(score(p, "attn_kl", l, Side::kK, scheme));
    }
    EXPECT_GT(with[3], with[0]) << scheme;
    EXPECT_GT(with[0], 10 * with[1]) << scheme;
    EXPECT_GT(with[0], 10 * with[2]) << scheme;
    const auto [low, high] = std::minmax_element(without.begin(), without.end());
    EXPECT_LT(*high / *low, 1.5) << scheme;
  }
}

}  // namespace
}  // namespace calib::sens
