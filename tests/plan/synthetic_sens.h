#pragma once
// Small sens results with known structure for the planner's tests.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/core/plan_constants.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan_test {

inline ModelIdentity tiny_model(int n_layers, int n_q_heads = 4, int n_kv_heads = 2, int head_dim = 64) {
  ModelIdentity model;
  model.architecture = "llama";
  model.name = "tiny";
  model.n_layers = n_layers;
  model.hidden_size = n_q_heads * head_dim;
  model.vocab_size = 100;
  model.max_positions = 32768;
  model.weights_sha256 = std::string(64, 'a');
  model.tokenizer_sha256 = std::string(64, 'b');
  for (int l = 0; l < n_layers; ++l) {
    LayerGeometry g;
    g.index = l;
    g.n_q_heads = n_q_heads;
    g.n_kv_heads = n_kv_heads;
    g.head_dim = head_dim;
    g.rotary_dim = head_dim;
    g.softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
    for (int i = 0; i < head_dim / 2; ++i) g.inv_freq.push_back(std::pow(10000.0, -2.0 * i / head_dim));
    model.layers.push_back(g);
  }
  return model;
}

/// Scores weight(layer, side) * 4^-bits of every scheme, metric fisher_vec, all valid for both sides unless keys only.
template <typename Weight>
sens::SensResult synthetic_sens(const ModelIdentity& model, const std::vector<std::string>& schemes, const std::vector<std::int64_t>& windows,
                                Weight weight, std::int64_t n_sinks = 4) {
  sens::SensResult sens;
  sens.model = model;
  sens.n_sinks = n_sinks;
  sens.seq_len = 2048;
  sens.candidate_list = "custom";
  sens.schemes = schemes;
  sens.windows = windows;
  sens::ScoreTable& table = sens.scores["fisher_vec"];
  for (const LayerGeometry& layer : model.layers)
    for (const Side side : {Side::kK, Side::kV}) {
      sens.units.push_back({layer.index, side});
      for (const std::string& text : schemes) {
        const kvrt::Scheme scheme = quant::parse_scheme(text);
        const bool valid = kvrt::check_shape(scheme, layer.head_dim, side == Side::kK).empty();
        sens.valid.push_back(valid);
        sens.base_bytes_per_token.push_back(0);
        for (std::size_t w = 0; w < windows.size(); ++w) {
          // A window of exact tokens takes a little off every score.
          const double score = weight(layer.index, side) * std::pow(4.0, -kvrt::code_bits(scheme.format)) / (1.0 + static_cast<double>(windows[w]) / 1024);
          table.mean.push_back(valid ? score : std::numeric_limits<double>::quiet_NaN());
          table.se.push_back(valid ? 0.05 * score : std::numeric_limits<double>::quiet_NaN());
        }
        if (valid && scheme.center)
          sens.params[std::to_string(layer.index) + (side == Side::kK ? "/k/" : "/v/") + text] = {
              {"mean", {layer.n_kv_heads, layer.head_dim}, std::vector<float>(static_cast<std::size_t>(layer.n_kv_heads * layer.head_dim), 0.25f)}};
        if (valid && scheme.lowrank > 0)
          for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, layer.n_kv_heads, layer.head_dim))
            sens.params[std::to_string(layer.index) + (side == Side::kK ? "/k/" : "/v/") + text].push_back(
                {c.name, {c.shape[0], c.shape[1]}, std::vector<float>(static_cast<std::size_t>(c.count()), 0.125f)});
        if (valid && scheme.granularity == kvrt::Granularity::kHead)
          sens.params[std::to_string(layer.index) + (side == Side::kK ? "/k/" : "/v/") + text] = {
              {"clip_hi", {layer.n_kv_heads}, std::vector<float>(static_cast<std::size_t>(layer.n_kv_heads), 3.5f)}};
      }
    }
  table.p99 = table.max = table.worst_decile = table.by_bucket = table.mean;
  sens.n_buckets = 1;
  return sens;
}

}  // namespace calib::plan_test
