#pragma once
// A model, text and run with every field set to something that is not its default.

#include <gtest/gtest.h>

#include "libcalib/base/model_geometry.h"

namespace calib::test {

inline ModelIdentity example_model(int n_layers = 2, int n_q_heads = 4, int n_kv_heads = 2, int head_dim = 16) {
  ModelIdentity out;
  out.architecture = "llama";
  out.name = "tiny \"model\" Δ";
  out.n_layers = n_layers;
  out.hidden_size = 64;
  out.vocab_size = 128000;
  out.max_positions = 256;
  out.weights_sha256 = std::string(64, 'a');
  out.fast = true;
  out.tokenizer_sha256 = std::string(64, 'b');
  for (int i = 0; i < n_layers; ++i) {
    LayerGeometry layer;
    layer.index = 2 * i;
    layer.n_q_heads = n_q_heads;
    layer.n_kv_heads = n_kv_heads;
    layer.head_dim = head_dim;
    layer.rotary_dim = head_dim / 2;
    layer.rope_style = i % 2 ? RopeStyle::kInterleaved : RopeStyle::kHalfSplit;
    layer.attention_factor = 1.2772589;
    layer.softmax_scale = 0.25;
    layer.sliding_window = 512 * i;
    for (int p = 0; p < layer.rotary_dim / 2; ++p) layer.inv_freq.push_back(1.0 / (1 + p + i));
    layer.k_bias_norm = 600.0 + i;
    layer.llamacpp_adjacent_pairs = i == 0;
    out.layers.push_back(layer);
  }
  return out;
}

inline DataIdentity example_data() {
  DataIdentity out;
  out.files = {{"a.txt", std::string(64, 'c'), "share=0.3", 3, 700}, {"-", std::string(64, 'd'), "", 2, 300}};
  out.tokenizer_sha256 = std::string(64, 'b');
  out.joining = "windows";
  out.seq_len = 256;
  out.n_documents = 5;
  out.n_tokens = 1000;
  out.n_bos = 5;
  out.documents_sha256 = std::string(64, 'e');
  return out;
}

inline Provenance example_provenance() {
  Provenance out;
  out.tool = "kvcalib";
  out.version = "0.1.0";
  out.argv = {"kvcalib", "--model", "m", "", "--data", "t.txt"};
  out.started_utc = "2026-01-02T03:04:05Z";
  out.seconds = 12.5;
  out.seed = 0xFFFFFFFFFFFFFFFFull;
  out.device = "cpu";
  out.dtype = "fp32";
  out.parents = {{"model", std::string(64, 'f')}, {"stats", std::string(64, '0')}};
  return out;
}

inline void expect_equal(const Provenance& a, const Provenance& b) {
  EXPECT_EQ(a.tool, b.tool);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.argv, b.argv);
  EXPECT_EQ(a.started_utc, b.started_utc);
  EXPECT_EQ(a.seconds, b.seconds);
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.parents, b.parents);
}

inline void expect_equal(const ModelIdentity& a, const ModelIdentity& b) {
  EXPECT_EQ(a.architecture, b.architecture);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.n_layers, b.n_layers);
  EXPECT_EQ(a.hidden_size, b.hidden_size);
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  EXPECT_EQ(a.max_positions, b.max_positions);
  EXPECT_EQ(a.weights_sha256, b.weights_sha256);
  EXPECT_EQ(a.fast, b.fast);
  EXPECT_EQ(a.tokenizer_sha256, b.tokenizer_sha256);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    const LayerGeometry &x = a.layers[i], &y = b.layers[i];
    EXPECT_EQ(x.index, y.index);
    EXPECT_EQ(x.n_q_heads, y.n_q_heads);
    EXPECT_EQ(x.n_kv_heads, y.n_kv_heads);
    EXPECT_EQ(x.head_dim, y.head_dim);
    EXPECT_EQ(x.rotary_dim, y.rotary_dim);
    EXPECT_EQ(x.rope_style, y.rope_style);
    EXPECT_EQ(x.attention_factor, y.attention_factor);
    EXPECT_EQ(x.softmax_scale, y.softmax_scale);
    EXPECT_EQ(x.sliding_window, y.sliding_window);
    EXPECT_EQ(x.inv_freq, y.inv_freq);
    EXPECT_EQ(x.k_bias_norm, y.k_bias_norm);
    EXPECT_EQ(x.llamacpp_adjacent_pairs, y.llamacpp_adjacent_pairs);
  }
}

inline void expect_equal(const DataIdentity& a, const DataIdentity& b) {
  ASSERT_EQ(a.files.size(), b.files.size());
  for (std::size_t i = 0; i < a.files.size(); ++i) {
    EXPECT_EQ(a.files[i].path, b.files[i].path);
    EXPECT_EQ(a.files[i].sha256, b.files[i].sha256);
    EXPECT_EQ(a.files[i].options, b.files[i].options);
    EXPECT_EQ(a.files[i].n_documents, b.files[i].n_documents);
    EXPECT_EQ(a.files[i].n_tokens, b.files[i].n_tokens);
  }
  EXPECT_EQ(a.tokenizer_sha256, b.tokenizer_sha256);
  EXPECT_EQ(a.joining, b.joining);
  EXPECT_EQ(a.seq_len, b.seq_len);
  EXPECT_EQ(a.n_documents, b.n_documents);
  EXPECT_EQ(a.n_tokens, b.n_tokens);
  EXPECT_EQ(a.n_bos, b.n_bos);
  EXPECT_EQ(a.documents_sha256, b.documents_sha256);
}

}  // namespace calib::test
