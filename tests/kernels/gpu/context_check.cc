#include "tests/kernels/gpu/context_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <istream>
#include <memory>
#include <ostream>

#include "kernels/core/device.h"

namespace kvrt::testing {
namespace {

constexpr int kSeqs = 2;
constexpr std::int64_t kPrefill[kSeqs] = {269, 30}, kSingleSteps = 37;
constexpr std::int64_t kLengths[kSeqs] = {kPrefill[0] + kSingleSteps, kPrefill[1] + kSingleSteps};
constexpr char kMagic[] = "kvrt context goldens 1\n";

/// The same numbers everywhere: sums of four bytes of a linear congruential generator, about normal, exact in fp32.
std::vector<float> rows_of(std::uint64_t seed, std::int64_t n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  for (float& v : x) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint64_t b = state >> 32;
    v = static_cast<float>(static_cast<int>(b & 255) + static_cast<int>(b >> 8 & 255) + static_cast<int>(b >> 16 & 255) + static_cast<int>(b >> 24) - 510) * 0x1p-7f;
  }
  return x;
}

/// Memory of a backend.
class Memory {
 public:
  Memory(bool on_device, std::size_t bytes) : on_device_(on_device), bytes_(bytes), host_(bytes, 0xFF) {}
  Memory(const Memory&) = delete;
  ~Memory() {
    if (device_) release_device(0, device_);
  }
  Status start() {
    if (!on_device_) return {};
    if (Status status = allocate_device(0, static_cast<std::int64_t>(bytes_), &device_); !status.ok()) return status;
    return copy_to_device(0, device_, host_.data(), static_cast<std::int64_t>(bytes_));
  }
  Status set(const void* from) {
    if (on_device_) return copy_to_device(0, device_, from, static_cast<std::int64_t>(bytes_));
    std::memcpy(host_.data(), from, bytes_);
    return {};
  }
  Status get(void* to) const {
    if (on_device_) return copy_to_host(to, device_, static_cast<std::int64_t>(bytes_), nullptr);
    std::memcpy(to, host_.data(), bytes_);
    return {};
  }
  void* data() { return on_device_ ? device_ : host_.data(); }
  std::size_t bytes() const { return bytes_; }

 private:
  bool on_device_;
  std::size_t bytes_;
  std::vector<std::uint8_t> host_;
  void* device_ = nullptr;
};

#define KVRT_RETURN_IF_BAD(call)                       \
  do {                                                 \
    if (Status s_ = (call); !s_.ok()) return s_;       \
  } while (0)

/// Constants of a scheme that the specs use: mean, thresholds.
struct Constants {
  std::vector<float> mean, lo, hi;
  std::string chan_perm;
  kvrt_unit_view view(const char* scheme, int heads, int width) {
    kvrt_unit_view u = {};
    u.scheme = scheme;
    const std::string text = scheme;
    if (text.find(".pre") != std::string::npos) chan_perm = "spread" + std::to_string(width / 2), u.chan_perm = chan_perm.c_str();
    if (text.find(".center") != std::string::npos) mean = rows_of(77, std::int64_t{heads} * width), u.mean = mean.data();
    const std::size_t n = text.find(".channel.static") != std::string::npos ? static_cast<std::size_t>(heads * width)
                          : text.find(".head") != std::string::npos         ? static_cast<std::size_t>(heads)
                                                                            : 0;
    lo.assign(n, -4.0f), hi.assign(n, 4.0f);
    if (n > 0) u.clip_hi = hi.data();
    if (n > 0 && text.substr(0, 3) != "fp8") u.clip_lo = lo.data();
    return u;
  }
};

Status make_plan(const ContextSpec& s, PlanHandle* plan) {
  std::vector<double> inv_freq;
  for (int i = 0; i < s.head_dim / 2; ++i) inv_freq.push_back(std::pow(10000.0, -2.0 * i / s.head_dim));
  Constants k, v;
  kvrt_layer_view layer = {};
  layer.index = 0, layer.n_q_heads = s.n_kv_heads * s.group, layer.n_kv_heads = s.n_kv_heads, layer.head_dim = s.head_dim;
  layer.rotary_dim = s.head_dim, layer.rope_style = KVRT_ROPE_HALF_SPLIT, layer.attention_factor = 1, layer.inv_freq = inv_freq.data();
  layer.softmax_scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  layer.sink_tokens = 4, layer.window_tokens = s.window;
  layer.k = k.view(s.k, s.n_kv_heads, s.head_dim), layer.v = v.view(s.v, s.n_kv_heads, s.head_dim);
  kvrt_plan_view view = {};
  view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
  return PlanHandle::adopt(view, plan);
}

/// Page lists of both sequences: page 0 of a pool is nobody's, ids fall.
struct Lists {
  std::vector<std::int32_t> ids[KVRT_SALIENT];
  std::int64_t offsets[KVRT_SALIENT][kSeqs + 1] = {};
  std::int64_t n_exact = 1, n_base = 1;

  Status make(const ContextHandle& context, int layer) {
    std::int64_t needed[kSeqs][KVRT_SEGMENTS];
    for (int s = 0; s < kSeqs; ++s) KVRT_RETURN_IF_BAD(checked([&](kvrt_error* e) { return kvrt_pages_needed(context.get(), layer, kLengths[s], needed[s], e); }));
    for (int i = 0; i < KVRT_SALIENT; ++i) {
      for (int s = 0; s < kSeqs; ++s) {
        offsets[i][s + 1] = offsets[i][s] + needed[s][i];
        for (std::int64_t p = 0; p < needed[s][i]; ++p) ids[i].push_back(static_cast<std::int32_t>(i == KVRT_BASE ? n_base++ : n_exact++));
      }
    }
    for (auto& list : ids) std::reverse(list.begin(), list.end());
    return {};
  }
  void fill(kvrt_batch* batch) const {
    for (int i = 0; i < KVRT_SALIENT; ++i) batch->pages[i] = {ids[i].data(), offsets[i]};
  }
};

/// R_t of one query head in double.
void rotate_query(const kvrt_layer_view& l, std::int64_t position, float* x) {
  for (int i = 0; i < l.rotary_dim / 2; ++i) {
    const double angle = static_cast<double>(position) * l.inv_freq[i], c = l.attention_factor * std::cos(angle), s = l.attention_factor * std::sin(angle);
    float& a = x[l.rope_style == KVRT_ROPE_INTERLEAVED ? 2 * i : i];
    float& b = x[l.rope_style == KVRT_ROPE_INTERLEAVED ? 2 * i + 1 : i + l.rotary_dim / 2];
    const double first = a * c - b * s, second = a * s + b * c;
    a = static_cast<float>(first), b = static_cast<float>(second);
  }
}

/// 4 u (A_v + A_s) with u of bf16, since exact pages are (KERNELS.md 7). q, keys: behind RoPE.
void add_tolerance(const kvrt_layer_view& l, const float* q, const float* keys, const float* values, std::int64_t n, const float* out, const float* lse,
                   float* tolerance) {
  const int width = l.head_dim, group = l.n_q_heads / l.n_kv_heads;
  for (int h = 0; h < l.n_q_heads; ++h) {
    std::vector<double> sum(static_cast<std::size_t>(width));
    for (std::int64_t t = 0; t < n; ++t) {
      const float* k = keys + (t * l.n_kv_heads + h / group) * width;
      const float* v = values + (t * l.n_kv_heads + h / group) * width;
      double dot = 0, magnitude = 0;
      for (int d = 0; d < width; ++d) {
        const double term = static_cast<double>(q[h * width + d]) * static_cast<double>(k[d]) * l.softmax_scale;
        dot += term, magnitude += std::fabs(term);
      }
      const double p = std::exp(dot - static_cast<double>(lse[h]));
      for (int d = 0; d < width; ++d) {
        const double value = v[d];
        sum[static_cast<std::size_t>(d)] += p * (std::fabs(value) + std::fabs(value - static_cast<double>(out[h * width + d])) * magnitude);
      }
    }
    for (int d = 0; d < width; ++d) tolerance[h * width + d] = static_cast<float>(4 * 0x1p-8 * sum[static_cast<std::size_t>(d)]);
  }
}

}  // namespace

const std::vector<ContextSpec>& context_specs() {
  static const std::vector<ContextSpec> specs = {{"bf16", "bf16", 128, 2, 4, 32},
                                                 {"int8.token.g", "int8.token.g", 128, 2, 4, 32},
                                                 {"int8.token.g", "int4.token.g", 64, 2, 3, 16},
                                                 {"int4.token.g", "int4.token.g", 128, 2, 8, 0},
                                                 {"int4.token.g64", "int4.token.g32", 128, 1, 4, 32},
                                                 {"int4.token.g.had", "int4.token.g.had", 64, 2, 4, 32},
                                                 {"int8.token.g.center", "int4.token.g.center", 64, 2, 4, 32},
                                                 {"int4.channel.g64", "int4.token.g", 64, 2, 4, 32},
                                                 {"int3.channel.g32", "int3.token.g64", 128, 2, 4, 32},
                                                 {"fp8e4m3.head", "fp8e4m3.head", 128, 2, 4, 32},
                                                 {"int8.channel.static", "int8.channel.g32", 64, 2, 4, 16},
                                                 {"lm4.token.g.had", "lm3.token.g.had", 64, 2, 4, 32},
                                                 {"int4.channel.g64.pre", "int4.token.g", 64, 2, 4, 32},
                                                 {"int3.channel.g64.pre", "int3.token.g", 128, 2, 4, 32}};
  return specs;
}

std::string name_of(const ContextSpec& s) {
  return std::string(s.k) + " / " + s.v + " D " + std::to_string(s.head_dim) + " G " + std::to_string(s.group) + " W " + std::to_string(s.window);
}

Status run_context(const ContextSpec& spec, kvrt_backend backend, ContextResult* out, const RunCalls& run) {
  PlanHandle plan;
  KVRT_RETURN_IF_BAD(make_plan(spec, &plan));
  return run_layer(plan, 0, backend, out, run);
}

Status run_layer(const PlanHandle& plan, int layer, kvrt_backend backend, ContextResult* out, const RunCalls& run) {
  const bool on_device = backend == KVRT_BACKEND_CUDA;
  const kvrt_plan_view view = plan.view();
  const kvrt_layer_view* const spec = std::find_if(view.layers, view.layers + view.n_layers, [&](const kvrt_layer_view& l) { return l.index == layer; });
  if (spec == view.layers + view.n_layers) return Status(Code::kArgument, "the plan has no layer " + std::to_string(layer));
  kvrt_limits limits = {};
  limits.max_batch = kSeqs, limits.max_length = 512, limits.accept_two_pass = 1;
  const kvrt_device device = {backend, 0};
  ContextHandle context;
  KVRT_RETURN_IF_BAD(ContextHandle::create(plan, limits, &context, &device));
  Lists lists;
  KVRT_RETURN_IF_BAD(lists.make(context, layer));
  std::vector<std::unique_ptr<Memory>> memory;
  const auto allocate = [&](std::size_t bytes, Memory** m) {
    memory.push_back(std::make_unique<Memory>(on_device, bytes));
    *m = memory.back().get();
    return (*m)->start();
  };
  kvrt_pools pools = {};
  Memory* pool_memory[2][KVRT_SIDES];
  for (int exact = 0; exact < 2; ++exact) {
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      kvrt_layout layout;
      KVRT_RETURN_IF_BAD(checked([&](kvrt_error* e) { return kvrt_page_layout(context.get(), layer, side, exact == 0 ? KVRT_WINDOW : KVRT_BASE, &layout, e); }));
      const std::int64_t n = exact == 0 ? lists.n_exact : lists.n_base;
      KVRT_RETURN_IF_BAD(allocate(static_cast<std::size_t>(n * layout.page_bytes), &pool_memory[exact][side]));
      (exact == 0 ? pools.exact : pools.base)[side] = {pool_memory[exact][side]->data(), 0, n};
    }
  }
  const std::int64_t row = std::int64_t{spec->n_kv_heads} * spec->head_dim, q_row = std::int64_t{spec->n_q_heads} * spec->head_dim, most = kPrefill[0] + kPrefill[1];
  const auto n_lse = static_cast<std::size_t>(kSeqs * spec->n_q_heads);
  Memory *k, *v, *q, *o, *lse, *scratch;
  const auto floats = [](std::int64_t n) { return static_cast<std::size_t>(n) * sizeof(float); };
  KVRT_RETURN_IF_BAD(allocate(floats(most * row), &k));
  KVRT_RETURN_IF_BAD(allocate(floats(most * row), &v));
  KVRT_RETURN_IF_BAD(allocate(floats(kSeqs * q_row), &q));
  KVRT_RETURN_IF_BAD(allocate(floats(kSeqs * q_row), &o));
  KVRT_RETURN_IF_BAD(allocate(n_lse * sizeof(float), &lse));
  KVRT_RETURN_IF_BAD(allocate(static_cast<std::size_t>(kvrt_workspace_bytes(context.get())), &scratch));
  const kvrt_workspace workspace = {scratch->data(), static_cast<std::int64_t>(scratch->bytes())};
  const std::vector<float> queries = rows_of(3, kSeqs * q_row);
  KVRT_RETURN_IF_BAD(q->set(queries.data()));

  std::int64_t lengths[kSeqs] = {0, 0}, row_offsets[kSeqs + 1];
  std::vector<std::int64_t> positions;
  kvrt_batch batch = {};
  batch.n_seqs = kSeqs, batch.seq_len = lengths;
  lists.fill(&batch);
  kvrt_qkv qkv = {};
  qkv.k.data = k->data(), qkv.v.data = v->data(), qkv.k_frame = KVRT_PRE_ROPE;
  for (std::int64_t step = 0; step <= kSingleSteps; ++step) {
    positions.clear(), row_offsets[0] = 0;
    for (int s = 0; s < kSeqs; ++s) {
      for (std::int64_t t = 0; t < (step == 0 ? kPrefill[s] : 1); ++t) positions.push_back(lengths[s] + t);
      row_offsets[s + 1] = static_cast<std::int64_t>(positions.size());
    }
    batch.row_offsets = row_offsets, batch.positions = positions.data();
    KVRT_RETURN_IF_BAD(k->set(rows_of(100 + static_cast<std::uint64_t>(step), most * row).data()));
    KVRT_RETURN_IF_BAD(v->set(rows_of(500 + static_cast<std::uint64_t>(step), most * row).data()));
    kvrt_attn attn = {};
    attn.q.data = q->data(), attn.q_frame = KVRT_PRE_ROPE, attn.out.data = o->data(), attn.lse = static_cast<float*>(lse->data());
    const bool is_last = step == kSingleSteps;
    const auto calls = [&](void* stream) {
      KVRT_RETURN_IF_BAD(checked([&](kvrt_error* e) { return kvrt_append(context.get(), layer, &batch, &qkv, &pools, &workspace, stream, e); }));
      if (!is_last) return Status();
      return checked([&](kvrt_error* e) { return kvrt_decode(context.get(), layer, &batch, &attn, &pools, &workspace, stream, e); });
    };
    KVRT_RETURN_IF_BAD(is_last && run ? run(calls) : calls(nullptr));
    for (int s = 0; s < kSeqs && !is_last; ++s) lengths[s] += row_offsets[s + 1] - row_offsets[s];
  }
  for (int exact = 0; exact < 2; ++exact) {
    for (int side = 0; side < KVRT_SIDES; ++side) {
      out->pages[exact][side].resize(pool_memory[exact][side]->bytes());
      KVRT_RETURN_IF_BAD(pool_memory[exact][side]->get(out->pages[exact][side].data()));
    }
  }
  out->out.resize(static_cast<std::size_t>(kSeqs * q_row)), out->log_sum_exp.resize(n_lse);
  KVRT_RETURN_IF_BAD(o->get(out->out.data()));
  KVRT_RETURN_IF_BAD(lse->get(out->log_sum_exp.data()));
  if (on_device) return {};
  out->tolerance.resize(out->out.size());
  for (int s = 0; s < kSeqs; ++s) {
    const std::int64_t n = kLengths[s];
    std::vector<float> rows[KVRT_SIDES];
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      rows[side].resize(static_cast<std::size_t>(n * row));
      kvrt_gather_args gather = {};
      gather.seq = s, gather.side = side, gather.frame = side == KVRT_K ? KVRT_POST_ROPE : KVRT_AS_STORED, gather.n_tokens = n, gather.out.data = rows[side].data();
      KVRT_RETURN_IF_BAD(checked([&](kvrt_error* e) { return kvrt_gather(context.get(), layer, &batch, &gather, &pools, &workspace, nullptr, e); }));
    }
    std::vector<float> rotated(queries.begin() + s * q_row, queries.begin() + (s + 1) * q_row);
    for (int h = 0; h < spec->n_q_heads; ++h) rotate_query(*spec, n - 1, rotated.data() + h * spec->head_dim);
    add_tolerance(*spec, rotated.data(), rows[KVRT_K].data(), rows[KVRT_V].data(), n, out->out.data() + s * q_row, out->log_sum_exp.data() + s * spec->n_q_heads,
                  out->tolerance.data() + s * q_row);
  }
  return {};
}

std::string compare_contexts(const ContextResult& reference, const ContextResult& result, double* worst) {
  *worst = 0;
  for (int exact = 0; exact < 2; ++exact) {
    for (int side = 0; side < KVRT_SIDES; ++side) {
      if (reference.pages[exact][side] != result.pages[exact][side])
        return std::string(exact == 0 ? "exact" : "base") + " pages of " + (side == KVRT_K ? "K" : "V") + " differ";
    }
  }
  if (reference.out.size() != result.out.size() || reference.tolerance.size() != result.out.size()) return "outputs are missing";
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const double ratio = std::fabs(static_cast<double>(result.out[i]) - reference.out[i]) / reference.tolerance[i];
    if (!(ratio <= 1)) return "output " + std::to_string(i) + " is " + std::to_string(result.out[i]) + ", expected " + std::to_string(reference.out[i]);
    *worst = std::max(*worst, ratio);
  }
  return "";
}

namespace {

template <class T>
void write_array(std::ostream& file, const std::vector<T>& x) {
  const std::uint64_t n = x.size();
  file.write(reinterpret_cast<const char*>(&n), sizeof n);
  file.write(reinterpret_cast<const char*>(x.data()), static_cast<std::streamsize>(n * sizeof(T)));
}
template <class T>
bool read_array(std::istream& file, std::vector<T>* x) {
  std::uint64_t n = 0;
  if (!file.read(reinterpret_cast<char*>(&n), sizeof n) || n > (1u << 26)) return false;
  x->resize(n);
  return static_cast<bool>(file.read(reinterpret_cast<char*>(x->data()), static_cast<std::streamsize>(n * sizeof(T))));
}

}  // namespace

void write_goldens(std::ostream& file, const std::vector<ContextResult>& results) {
  file.write(kMagic, sizeof kMagic - 1);
  for (const ContextResult& r : results) {
    for (const auto& sides : r.pages) for (const auto& pages : sides) write_array(file, pages);
    write_array(file, r.out), write_array(file, r.log_sum_exp), write_array(file, r.tolerance);
  }
}

std::vector<ContextResult> read_goldens(std::istream& file) {
  char magic[sizeof kMagic - 1];
  if (!file.read(magic, sizeof magic) || std::memcmp(magic, kMagic, sizeof magic) != 0) return {};
  std::vector<ContextResult> results(context_specs().size());
  for (ContextResult& r : results) {
    for (auto& sides : r.pages) {
      for (auto& pages : sides) if (!read_array(file, &pages)) return {};
    }
    if (!read_array(file, &r.out) || !read_array(file, &r.log_sum_exp) || !read_array(file, &r.tolerance)) return {};
  }
  return results;
}

}  // namespace kvrt::testing
