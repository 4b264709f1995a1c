#include "tests/support/tiny_models.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>

#include "libcalib/base/rng.h"
#include "libcalib/base/sha256.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"

namespace calib::test {
namespace {

constexpr std::uint64_t kSeed = 1;

bool ends_with(const std::string& text, const std::string& tail) {
  return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

std::int64_t count(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (auto d : shape) n *= d;
  return n;
}

void add(TinyModel& m, const std::string& name, std::vector<std::int64_t> shape) {
  TinyTensor t{name, std::move(shape), {}};
  const auto n = static_cast<std::size_t>(count(t.shape));
  if (t.shape.size() == 1) {
    t.values.assign(n, ends_with(name, ".bias") || m.gemma() ? 0.0f : 1.0f);
  } else {
    // Embedding rows of gemma are scaled up when they are read; tied to the head, rows of unit elements would drown everything else.
    const bool unit = name == "model.embed_tokens.weight" && !m.gemma();
    const double scale = unit ? 1.0 : 1.0 / std::sqrt(static_cast<double>(t.shape[1]));
    Rng rng = Rng::for_item(kSeed, fnv1a64(name));
    t.values.resize(n);
    for (float& v : t.values) v = static_cast<float>(rng.normal() * scale);
  }
  m.tensors.push_back(std::move(t));
}

void add_all(TinyModel& m) {
  const std::int64_t q = m.n_q_heads * m.head_dim, kv = m.n_kv_heads * m.head_dim;
  const bool biases = m.model_type == "qwen2", head_norms = m.model_type == "qwen3" || m.gemma();
  add(m, "model.embed_tokens.weight", {m.vocab, m.hidden});
  for (std::int64_t l = 0; l < m.n_layers; ++l) {
    const std::string p = fmt::format("model.layers.{}.", l);
    add(m, p + "input_layernorm.weight", {m.hidden});
    add(m, p + "self_attn.q_proj.weight", {q, m.hidden});
    add(m, p + "self_attn.k_proj.weight", {kv, m.hidden});
    add(m, p + "self_attn.v_proj.weight", {kv, m.hidden});
    if (biases) {
      add(m, p + "self_attn.q_proj.bias", {q});
      add(m, p + "self_attn.k_proj.bias", {kv});
      add(m, p + "self_attn.v_proj.bias", {kv});
    }
    if (head_norms) {
      add(m, p + "self_attn.q_norm.weight", {m.head_dim});
      add(m, p + "self_attn.k_norm.weight", {m.head_dim});
    }
    add(m, p + "self_attn.o_proj.weight", {m.hidden, q});
    add(m, p + "post_attention_layernorm.weight", {m.hidden});
    if (m.gemma()) {
      add(m, p + "pre_feedforward_layernorm.weight", {m.hidden});
      add(m, p + "post_feedforward_layernorm.weight", {m.hidden});
    }
    add(m, p + "mlp.gate_proj.weight", {m.intermediate, m.hidden});
    add(m, p + "mlp.up_proj.weight", {m.intermediate, m.hidden});
    add(m, p + "mlp.down_proj.weight", {m.hidden, m.intermediate});
  }
  add(m, "model.norm.weight", {m.hidden});
  if (!m.tied) add(m, "lm_head.weight", {m.vocab, m.hidden});
}

void set_big_biases(TinyModel& m) {
  const auto name = [](int l) { return fmt::format("model.layers.{}.self_attn.k_proj.bias", l); };
  for (const auto& [l, norm] : {std::pair{0, 600.0}, std::pair{3, 900.0}})
    for (int c : {0, 8}) m.tensor(name(l)).values[static_cast<std::size_t>(c)] = static_cast<float>(norm / std::sqrt(2.0));
  for (int l : {1, 2}) {
    auto& bias = m.tensor(name(l)).values;
    Rng rng = Rng::for_item(kSeed, fnv1a64(name(l)));
    std::vector<double> draw(bias.size());
    double sum = 0;
    for (double& v : draw) v = rng.normal(), sum += v * v;
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(draw[i] * 20.0 / std::sqrt(sum));
  }
}

}  // namespace

std::uint64_t fnv1a64(const std::string& text) {
  std::uint64_t h = 14695981039346656037ull;
  for (unsigned char c : text) h = (h ^ c) * 1099511628211ull;
  return h;
}

const TinyTensor& TinyModel::tensor(const std::string& name) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const TinyTensor& t) { return t.name == name; });
  if (it == tensors.end()) throw std::runtime_error("no tensor " + name);
  return *it;
}
TinyTensor& TinyModel::tensor(const std::string& name) {
  return const_cast<TinyTensor&>(static_cast<const TinyModel&>(*this).tensor(name));
}

TinyModel make_tiny_model(const std::string& name) {
  TinyModel m;
  m.n_layers = 4;
  if (name == "m-llama" || name == "m-mistral") {
    m.model_type = name.substr(2);
    m.n_q_heads = 8, m.n_kv_heads = 4, m.head_dim = 8;
    if (name == "m-mistral") m.sliding_window = 8;
  } else if (name == "m-smollm3") {
    m.model_type = "smollm3";
    m.n_q_heads = 8, m.n_kv_heads = 4, m.head_dim = 8;
  } else if (name == "m-qwen2" || name == "m-qwen2-big") {
    m.model_type = "qwen2";
    m.n_q_heads = 4, m.n_kv_heads = 2, m.head_dim = 16;
  } else if (name == "m-qwen3") {
    m.model_type = "qwen3";
    m.n_layers = 3, m.n_q_heads = 4, m.n_kv_heads = 2, m.head_dim = 32;
    m.explicit_head_dim = true;
  } else if (name == "m-gemma3") {
    m.model_type = "gemma3_text";
    m.n_q_heads = 4, m.n_kv_heads = 2, m.head_dim = 16;
    m.sliding_window = 8, m.rope_theta = 1e6;
    m.tied = m.explicit_head_dim = true;
  } else {
    throw std::runtime_error("no standard model " + name);
  }
  add_all(m);
  if (name == "m-qwen2-big") set_big_biases(m);
  return m;
}

std::optional<TinyModel> restore_s260k() {
  const std::string path = shared_data("models/stories260K.bin");
  if (path.empty()) return {};
  std::string bytes = read_file(path);
  if (bytes.size() != 1'056'540) throw std::runtime_error("stories260K.bin has an unexpected size");

  TinyModel m;
  m.model_type = "llama";
  m.n_layers = 5, m.n_q_heads = 8, m.n_kv_heads = 4, m.head_dim = 8, m.intermediate = 172, m.vocab = 512;
  m.max_positions = 512, m.rms_eps = 1e-5, m.tied = true, m.ids_tokenizer = true;

  std::vector<float> data((bytes.size() - 28) / 4);
  std::memcpy(data.data(), bytes.data() + 28, data.size() * 4);
  std::size_t at = 0;
  const auto skip = [&](std::int64_t n) { const std::size_t here = at; at += static_cast<std::size_t>(n); return here; };
  // The stored matrices went through five in-place transposes with swapped dimensions; five more undo them.
  const auto matrices = [&](std::int64_t rows, std::int64_t columns) {
    const std::size_t begin = skip(m.n_layers * rows * columns);
    const auto n = static_cast<std::size_t>(rows * columns);
    std::vector<float> turned(n);
    for (std::int64_t l = 0; l < m.n_layers; ++l) {
      float* block = data.data() + begin + static_cast<std::size_t>(l) * n;
      for (int i = 0; i < 5; ++i) {
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c) turned[static_cast<std::size_t>(c * rows + r)] = block[r * columns + c];
        std::copy(turned.begin(), turned.end(), block);
      }
    }
    return begin;
  };
  const std::size_t embedding = skip(m.vocab * m.hidden), attn_norm = skip(m.n_layers * m.hidden);
  const std::size_t wq = matrices(64, 64), wk = matrices(32, 64), wv = matrices(32, 64), wo = matrices(64, 64);
  const std::size_t ffn_norm = skip(m.n_layers * m.hidden);
  const std::size_t w1 = matrices(172, 64), w2 = matrices(64, 172), w3 = matrices(172, 64), norm = skip(m.hidden);
  std::memcpy(bytes.data() + 28, data.data(), data.size() * 4);
  if (sha256_hex(bytes) != "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696")
    throw std::runtime_error("restored stories260K does not have the documented sha256");

  const auto tensor = [&](const std::string& name, std::vector<std::int64_t> shape, std::size_t begin, std::int64_t layer) {
    const auto n = static_cast<std::size_t>(count(shape));
    const auto first = data.begin() + static_cast<std::ptrdiff_t>(begin + static_cast<std::size_t>(layer) * n);
    m.tensors.push_back({name, std::move(shape), {first, first + static_cast<std::ptrdiff_t>(n)}});
  };
  // llama2.c pairs channels 2i and 2i+1; Hugging Face pairs i and i + head_dim/2.
  const auto half_split = [&](const std::string& name) {
    TinyTensor& t = m.tensor(name);
    const std::vector<float> old = t.values;
    const auto columns = static_cast<std::size_t>(t.shape[1]), half = static_cast<std::size_t>(m.head_dim / 2);
    for (std::size_t row = 0; row < static_cast<std::size_t>(t.shape[0]); ++row) {
      const std::size_t head = row / (2 * half), r = row % (2 * half);
      const std::size_t to = head * 2 * half + r / 2 + (r % 2) * half;
      std::copy_n(old.begin() + static_cast<std::ptrdiff_t>(row * columns), columns, t.values.begin() + static_cast<std::ptrdiff_t>(to * columns));
    }
  };
  tensor("model.embed_tokens.weight", {512, 64}, embedding, 0);
  for (std::int64_t l = 0; l < m.n_layers; ++l) {
    const std::string p = fmt::format("model.layers.{}.", l);
    tensor(p + "input_layernorm.weight", {64}, attn_norm, l);
    tensor(p + "self_attn.q_proj.weight", {64, 64}, wq, l);
    tensor(p + "self_attn.k_proj.weight", {32, 64}, wk, l);
    half_split(p + "self_attn.q_proj.weight");
    half_split(p + "self_attn.k_proj.weight");
    tensor(p + "self_attn.v_proj.weight", {32, 64}, wv, l);
    tensor(p + "self_attn.o_proj.weight", {64, 64}, wo, l);
    tensor(p + "post_attention_layernorm.weight", {64}, ffn_norm, l);
    tensor(p + "mlp.gate_proj.weight", {172, 64}, w1, l);
    tensor(p + "mlp.up_proj.weight", {172, 64}, w3, l);
    tensor(p + "mlp.down_proj.weight", {64, 172}, w2, l);
  }
  tensor("model.norm.weight", {64}, norm, 0);
  return m;
}

int shard_of(const TinyModel& model, const std::string& name, int n_shards) {
  const std::string layers = "model.layers.";
  if (name == "model.embed_tokens.weight") return 0;
  if (name.compare(0, layers.size(), layers) != 0) return n_shards - 1;
  const std::int64_t l = std::stoll(name.substr(layers.size()));
  return static_cast<int>(std::min<std::int64_t>((l * n_shards + model.n_layers - 1) / model.n_layers, n_shards - 1));
}

std::string txt(std::size_t n_bytes) {
  Rng rng(3);
  std::string out;
  for (int word = 1; out.size() < n_bytes; ++word) {
    for (std::uint64_t i = 2 + rng.below(7); i > 0; --i) out += static_cast<char>('a' + rng.below(26));
    out += word % 12 == 0 ? '\n' : ' ';
  }
  out.resize(n_bytes);
  return out;
}

}  // namespace calib::test
