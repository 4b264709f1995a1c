#pragma once
// A small plan as the two files that kvplan writes: two layers of different schemes, one with constants.

#include <cstring>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "kernels/core/sha256.h"

namespace kvrt::testing {

struct TinyPlan {
  nlohmann::ordered_json document;
  std::string tensors;

  TinyPlan() {
    using nlohmann::ordered_json;
    constexpr int kHeads = 2, kWidth = 32;
    const ordered_json inv_freq = {1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.001953125, 0.0009765625, 0.00048828125,
                                   0.000244140625, 0.0001220703125, 0.00006103515625, 0.000030517578125};
    ordered_json layers = ordered_json::array();
    for (const int index : {0, 3}) {
      layers.push_back({{"index", index}, {"n_q_heads", 6}, {"n_kv_heads", kHeads}, {"head_dim", kWidth}, {"rotary_dim", kWidth}, {"rope_style", "half_split"},
                        {"attention_factor", 1.0}, {"softmax_scale", 0.17677669529663687}, {"sliding_window", 0}, {"k_bias_norm", 0.0},
                        {"llamacpp_adjacent_pairs", true}, {"inv_freq", inv_freq}});
    }
    document["schema"] = {{"name", "kvcalib.plan"}, {"version", 1}};
    document["model"] = {{"architecture", "llama"}, {"name", "tiny"}, {"n_layers", 4}, {"weights_sha256", std::string(64, 'a')}, {"layers", layers}};
    document["request"] = {{"target", "native"}};
    document["tiers"] = {{"sink_tokens", 4}, {"window_tokens", 16}, {"salient", nullptr}};
    const auto unit = [](const char* scheme, int bits, const char* frame, const ordered_json& rotation, const char* perm) {
      ordered_json u = {{"scheme", scheme}, {"bits", bits}, {"rotation", rotation}, {"chan_perm", perm}, {"params", ordered_json::object()}};
      if (*frame) u["frame"] = frame;
      return u;
    };
    const ordered_json had = {{"kind", "hadamard"}, {"size", kWidth}, {"base", 1}, {"power", kWidth}};
    document["layers"] = ordered_json::array();
    document["layers"].push_back({{"index", 0}, {"salient_fraction", 0.0}, {"k", unit("int4.channel.g32.pre", 4, "pre", nullptr, "spread16")},
                                  {"v", unit("int3.token.g.had", 3, "", had, "natural")}});
    document["layers"].push_back({{"index", 3}, {"salient_fraction", 0.0}, {"window_tokens", 8}, {"k", unit("int4.token.g.center.had", 4, "post", had, "natural")},
                                  {"v", unit("fp8e4m3.head", 8, "", nullptr, "natural")}});
    document["runtime"] = {{"page_tokens", 64}, {"scale_refresh_tokens", 0},
                           {"rope", {{{"layers", {0, 3}}, {"layout", "half_split"}, {"rotary_width", kWidth}, {"attention_factor", 1.0}, {"inv_freq", inv_freq}}}}};

    ordered_json header;
    std::string data;
    const auto add = [&](int layer, const char* side, const char* what, const ordered_json& shape, int n, float value) {
      const std::string name = std::string("layers.") + (layer ? "3" : "0") + "." + side + "." + what;
      header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {data.size(), data.size() + 4 * static_cast<std::size_t>(n)}}};
      for (int i = 0; i < n; ++i) data.append(reinterpret_cast<const char*>(&value), sizeof value);
      document["layers"][layer ? 1 : 0][side]["params"][what] = {{"tensor", name}, {"shape", shape}};
    };
    add(3, "k", "mean", {kHeads, kWidth}, kHeads * kWidth, 0.5f);
    add(3, "v", "clip_hi", ordered_json::array({kHeads}), kHeads, 4.0f);
    const std::string text = header.dump();
    std::uint64_t length = text.size();
    tensors.assign(reinterpret_cast<const char*>(&length), sizeof length);
    tensors += text + data;
    seal();
  }
  /// Makes /tensors say what the tensors are.
  void seal() { document["tensors"] = {{"file", "tiny.safetensors"}, {"bytes", tensors.size()}, {"sha256", sha256_hex(tensors.data(), tensors.size())}}; }
  std::string json() const { return document.dump(1); }
  void write(const std::string& folder) const {
    std::ofstream(folder + "/tiny.json", std::ios::binary) << json();
    std::ofstream(folder + "/tiny.safetensors", std::ios::binary) << tensors;
  }
};

}  // namespace kvrt::testing
