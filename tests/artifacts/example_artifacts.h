#pragma once
// Small complete artifacts with seeded content.

#include <cmath>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/base/rng.h"
#include "libcalib/sens/sens_result.h"
#include "tests/io/example_identity.h"

namespace calib::test {

/// Statistics of a few seeded documents for every layer of `model`.
inline artifacts::StatsFile example_stats(const ModelIdentity& model = example_model(), std::uint64_t seed = 1, int n_documents = 2,
                                          std::int64_t n_tokens = 100) {
  artifacts::StatsFile out;
  out.header.provenance = example_provenance();
  out.header.model = model;
  out.header.data = example_data();
  out.header.n_sinks = 4;
  out.header.rows_per_document = 128;
  out.reference.nll_sum = {120.5, 77.25};
  out.reference.nll_count = {60, 40};
  out.reference.massive = {{0, 1, 40, 7, -1234.5, 2000.0, true}, {2, 0, 0, 3, 500.0, 1500.0, false}};
  out.reference.warnings = {"3 distinct tokens in 100"};
  out.reference.n_distinct_tokens = 3;
  out.reference.commonest_token_share = 0.5;
  ThreadPool pool(1);
  for (const LayerGeometry& g : model.layers) {
    stats::LayerStats layer(g, out.header.n_sinks);
    for (int d = 0; d < n_documents; ++d) {
      Rng rng = Rng::for_item(seed, static_cast<std::uint64_t>(g.index), static_cast<std::uint64_t>(d));
      const auto normals = [&](int heads) {
        std::vector<float> x(static_cast<std::size_t>(n_tokens * heads * g.head_dim));
        for (float& v : x) v = static_cast<float>(rng.normal());
        return x;
      };
      const auto k_pre = normals(g.n_kv_heads), k_post = normals(g.n_kv_heads), v = normals(g.n_kv_heads), q_pre = normals(g.n_q_heads),
                 q_post = normals(g.n_q_heads);
      layer.add_document({n_tokens, k_pre.data(), k_post.data(), v.data(), q_pre.data(), q_post.data()}, pool);
      stats::SampledRows rows;
      rows.rows = {n_tokens - 10, n_tokens - 1};
      rows.row_weight = {2.5, 1};
      std::vector<float> p(static_cast<std::size_t>(g.n_q_heads * 2 * n_tokens), 0.0f);
      for (int h = 0; h < g.n_q_heads; ++h)
        for (std::size_t r = 0; r < 2; ++r) {
          float* row = p.data() + (static_cast<std::size_t>(h) * 2 + r) * static_cast<std::size_t>(n_tokens);
          double total = 0;
          for (std::int64_t j = 0; j <= rows.rows[r]; ++j) total += row[j] = static_cast<float>(std::exp(rng.normal()));
          for (std::int64_t j = 0; j <= rows.rows[r]; ++j) row[j] = static_cast<float>(row[j] / total);
        }
      rows.p = p.data();
      layer.add_attention(rows, n_tokens, pool);
    }
    out.layers.push_back(std::move(layer));
  }
  return out;
}

inline sens::SensResult example_sens() {
  sens::SensResult out;
  out.model = example_model();
  out.data = example_data();
  out.calibration_data = example_data();
  out.calibration_data.seq_len = 512;
  out.provenance = example_provenance();
  out.n_sinks = 4;
  out.seq_len = 2048;
  out.candidate_list = "custom";
  out.schemes = {"bf16", "int4.token.g8", "int3.channel.g64.pre"};
  out.windows = {0, 128};
  out.units = {{0, Side::kK}, {0, Side::kV}, {2, Side::kK}, {2, Side::kV}};
  out.n_buckets = 3;
  const std::size_t n_pairs = out.units.size() * out.schemes.size();
  Rng rng(5);
  for (std::size_t i = 0; i < n_pairs; ++i) {
    out.valid.push_back(i % 4 != 3);
    out.base_bytes_per_token.push_back(out.valid.back() ? 100.0 + static_cast<double>(i) : std::nan(""));
  }
  for (const char* metric : {"attn_kl", "fisher_vec"}) {
    sens::ScoreTable& table = out.scores[metric];
    for (std::size_t i = 0; i < n_pairs * out.windows.size(); ++i) {
      const bool valid = out.valid[i / out.windows.size()] != 0;
      for (std::vector<double>* field : {&table.mean, &table.se, &table.p99, &table.max, &table.worst_decile})
        field->push_back(valid ? rng.uniform() : std::nan(""));
      for (int b = 0; b < out.n_buckets; ++b) table.by_bucket.push_back(valid ? rng.uniform() : std::nan(""));
    }
  }
  out.params["00/k/int4.token.g8"] = {{"clip_hi", {2, 2}, {1, 2, 3, 4}}, {"mean", {3}, {0.5f, -1, 2}}};
  out.params["02/v/int4.token.g8"] = {{"scale", {1}, {7}}};
  return out;
}

/// The same with isolated runs of fisher_vec: the keys of layer 0 taken up, one option of layer 2's values beside them.
inline sens::SensResult example_isolated() {
  sens::SensResult out = example_sens();
  sens::IsolatedRuns runs;
  runs.data = out.data, runs.data.documents_sha256 = std::string(64, 'e');
  runs.provenance = out.provenance;
  runs.metric = "fisher_vec";
  runs.above = 0.02;
  runs.k = {1.25, 0.0625, 7}, runs.v = {1.5, 0.125, 3};
  runs.taken_up = {1, 0, 0, 0};
  runs.mean.assign(out.scores.at("fisher_vec").mean.size(), std::nan(""));
  runs.se = runs.mean;
  for (const std::size_t i : {out.index(0, 0, 0), out.index(0, 1, 0), out.index(0, 1, 1), out.index(3, 1, 1)})
    runs.mean[i] = 0.25 * static_cast<double>(i), runs.se[i] = 0.01;
  out.isolated = runs;
  return out;
}

}  // namespace calib::test
