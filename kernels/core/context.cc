#include "kernels/core/context.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "kernels/core/device_tables.h"
#include "kernels/core/isa.h"
#include "kernels/page/verify_launch.h"
#include "kernels/read/decode_launch.h"
#include "kernels/read/decode_step.h"
#include "kernels/read/gather_launch.h"
#include "kernels/reference/reference.h"
#include "kernels/write/append_launch.h"
#include "kernels/write/append_sequence.h"

namespace kvrt {
namespace {

constexpr std::int64_t kMaxLength = std::int64_t{1} << 32;

Status check_limits(const kvrt_limits& l) {
  if (l.max_batch < 1) return Status(Code::kArgument, "limits: max_batch is " + std::to_string(l.max_batch) + ", expected at least 1");
  if (l.max_length < 1 || l.max_length > kMaxLength) {
    return Status(Code::kArgument, "limits: max_length is " + std::to_string(l.max_length) + ", expected 1 to " + std::to_string(kMaxLength));
  }
  if (l.max_q_len < 1) return Status(Code::kArgument, "limits: max_q_len is " + std::to_string(l.max_q_len));
  if (l.max_q_len > 1)
    return Status(Code::kUnsupported, "limits: max_q_len is " + std::to_string(l.max_q_len) + "; several query tokens a step are not offered by this build");
  if (l.first_kv_head < 0 || l.n_kv_heads < 0 || (l.n_kv_heads == 0 && l.first_kv_head > 0)) {
    return Status(Code::kArgument, "limits: heads " + std::to_string(l.first_kv_head) + " + " + std::to_string(l.n_kv_heads) + " are no range");
  }
  if (l.n_workers < 1) return Status(Code::kArgument, "limits: n_workers is " + std::to_string(l.n_workers));
  return {};
}

/// Stored place -> channel, for the blocks of llama.cpp on keys of models whose pairs it holds side by side.
std::vector<std::int32_t> adjacent_pairs(const LayerPlan& layer) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(layer.layout.head_dim));
  for (std::size_t c = 0; c < order.size(); ++c) order[c] = static_cast<std::int32_t>(c);
  for (int i = 0; 2 * i + 1 < layer.rotary_dim; ++i) {
    order[static_cast<std::size_t>(2 * i)] = i;
    order[static_cast<std::size_t>(2 * i + 1)] = i + layer.rotary_dim / 2;
  }
  return order;
}

}  // namespace

const char* backend_name(kvrt_backend backend) {
  switch (backend) {
    case KVRT_BACKEND_REF: return "ref";
    case KVRT_BACKEND_CPU: return "cpu";
    case KVRT_BACKEND_CUDA: return "cuda";
    default: return "default";
  }
}

Status choose_backend(const kvrt_device& device, kvrt_backend* out) {
  const char* forced = std::getenv("KVRT_FORCE_BACKEND");
  const std::string_view name = forced ? forced : "";
  const std::string offered = has_cuda() ? "ref, cpu and cuda" : "ref and cpu";
  if (name.empty()) {
    switch (device.backend) {
      case KVRT_BACKEND_REF: *out = KVRT_BACKEND_REF; return {};
      case KVRT_BACKEND_DEFAULT: case KVRT_BACKEND_CPU: *out = KVRT_BACKEND_CPU; return {};
      case KVRT_BACKEND_CUDA: *out = KVRT_BACKEND_CUDA; break;
      default: return Status(Code::kArgument, "backend " + std::to_string(device.backend) + " is unknown; this build offers " + offered);
    }
    return has_cuda() ? Status() : Status(Code::kUnsupported, "backend cuda is not in this build; it offers " + offered);
  }
  // baseline (neon), avx2, avx512: the names of fake_quant's vector paths.
  const bool is_cpu = name == "cpu" || name == kBaselineName || name == "avx2" || name == "avx512", is_cuda = name == "cuda" && has_cuda();
  if (!is_cpu && !is_cuda && name != "ref") return Status(Code::kUnsupported, "KVRT_FORCE_BACKEND is '" + std::string(name) + "'; this build offers " + offered);
  *out = is_cpu ? KVRT_BACKEND_CPU : is_cuda ? KVRT_BACKEND_CUDA : KVRT_BACKEND_REF;
  return {};
}

void DriverError::keep(const std::string& text) {
  int expected = kNone;
  if (!state_.compare_exchange_strong(expected, kWriting)) return;
  text.copy(text_, sizeof text_ - 1);
  state_.store(kWritten, std::memory_order_release);
}

Status keep_driver_error(const Context& context, Status status) {
  if (status.code() == Code::kCuda) context.driver_error().keep(status.text());
  return status;
}

Context::Context() = default;
Context::~Context() = default;

Status Context::add_unit(const LayerPlan& plan, kvrt_side side, LayerContext* layer) {
  const UnitPlan& unit = plan.units[side];
  UnitContext& out = layer->units[side];
  const int first = limits_.first_kv_head, heads = layer->layout.n_kv_heads, width = layer->layout.head_dim;
  const std::int64_t first_value = static_cast<std::int64_t>(first) * width;
  const CacheSide cache_side = side == KVRT_K ? CacheSide::kK : CacheSide::kV;
  out.name = unit_name(plan, cache_side);
  out.pre = unit.scheme.pre;

  FakeQuantArgs& args = out.args;
  args.scheme = unit.scheme;
  args.is_key = side == KVRT_K;
  args.n_heads = heads, args.head_dim = width;
  args.page_tokens = block_layout(layer->layout, cache_side).page_tokens;
  args.round_input_to_bf16 = encodes_bf16(layer->tiers());
  if (unit.block_order == "adjacent" && plan.rope_style == KVRT_ROPE_HALF_SPLIT) out.block_order = adjacent_pairs(plan);
  const auto from = [](const std::vector<float>& v, std::int64_t offset) { return v.empty() ? nullptr : v.data() + offset; };
  const std::int64_t threshold = unit.scheme.granularity == Granularity::kHead ? first : unit.scheme.granularity == Granularity::kChannelStatic ? first_value : 0;
  args.block_order = out.block_order.empty() ? nullptr : out.block_order.data();
  args.mean = from(unit.mean, first_value), args.smooth = from(unit.smooth, first_value);
  args.clip_lo = from(unit.clip_lo, threshold), args.clip_hi = from(unit.clip_hi, threshold);
  args.clip_alpha = from(unit.clip_alpha, 0), args.codebook = from(unit.codebook, 0);
  args.rotary_dim = plan.rotary_dim, args.interleaved = plan.rope_style == KVRT_ROPE_INTERLEAVED;
  const std::int64_t triangle = static_cast<std::int64_t>(width) * (width + 1) / 2;
  if (unit.scheme.ef) args.ef_u = unit.ef_u.data() + first * triangle, args.ef_order = unit.ef_order.data() + first_value;
  if (Status status = make_fake_quant_job(args, &out.job); !status.ok()) return Status(status.code(), out.name + ": " + status.text());

  for (int head = 0; out.job.mean && head < heads; ++head) {
    std::vector<float> row(static_cast<std::size_t>(width));
    for (int p = 0; p < width; ++p) {
      const std::int64_t at = std::int64_t{head} * width + (out.job.block_order ? out.job.block_order[p] : p);
      row[static_cast<std::size_t>(p)] = out.job.smooth ? out.job.mean[at] / out.job.smooth[at] : out.job.mean[at];
    }
    if (out.job.had.size) hadamard_rotate(out.job.had, row.data(), width, false);
    for (int p = 0; p < width; ++p) out.stored_mean.push_back(row[static_cast<std::size_t>(stored_channel(unit.spread, width, p))]);
  }
  out.base_page = block_layout(layer->layout, cache_side);
  out.exact_page = exact_layout(layer->layout, cache_side);
  out.exact = make_page_codec(Scheme{}, 16, width, static_cast<int>(kExactPageTokens));
  PageCodec codec = page_codec_of(out.job, out.base_page.page_tokens);
  codec.spread = unit.spread;
  const bool by_channel = unit.scheme.granularity == Granularity::kChannelStatic;
  if (by_channel) out.channel_ranges.resize(static_cast<std::size_t>(heads) * static_cast<std::size_t>(width));
  for (int head = 0; head < heads; ++head) {
    const StaticGrids g = static_grids(out.job, head);
    StaticRange* const ranges = by_channel ? &out.channel_ranges[static_cast<std::size_t>(head) * static_cast<std::size_t>(width)] : &codec.range;
    for (int c = 0; g.lo && c < (by_channel ? width : 1); ++c) ranges[c] = {g.lo[c], g.scale[c], g.min[c], g.max[c]};
    codec.channel_ranges = by_channel ? ranges : nullptr;
    if (unit.scheme.ef) codec.ef_u = args.ef_u + head * triangle, codec.ef_order = args.ef_order + static_cast<std::int64_t>(head) * width;
    out.codecs.push_back(codec);
  }
  return {};
}

void Context::add_rope(const LayerPlan& plan, LayerContext* layer) {
  if (plan.rope_style == KVRT_ROPE_NONE) return;
  RopeStorage* storage = nullptr;
  for (const auto& r : ropes_) {
    if (r->first->inv_freq == plan.inv_freq && r->first->attention_factor == plan.attention_factor) storage = r.get();
  }
  const std::size_t n_pairs = plan.inv_freq.size();
  if (!storage) {
    ropes_.push_back(std::make_unique<RopeStorage>());
    storage = ropes_.back().get();
    storage->first = &plan;
    const auto fill = [&](std::int64_t n, std::int64_t step, double factor, std::vector<float>* table) {
      table->resize(static_cast<std::size_t>(n) * 2 * n_pairs);
      for (std::int64_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < n_pairs; ++i) {
          const double angle = static_cast<double>(r * step) * plan.inv_freq[i];
          float* const row = table->data() + static_cast<std::size_t>(r) * 2 * n_pairs;
          row[i] = static_cast<float>(factor * std::cos(angle));
          row[n_pairs + i] = static_cast<float>(factor * std::sin(angle));
        }
      }
    };
    fill((limits_.max_length + kRopeCoarse - 1) / kRopeCoarse, kRopeCoarse, plan.attention_factor, &storage->coarse);
    fill(kRopeFine, 1, 1.0, &storage->fine);
  }
  layer->rope.coarse = storage->coarse.data(), layer->rope.fine = storage->fine.data();
  layer->rope.n_pairs = static_cast<int>(n_pairs);
  layer->n_coarse = static_cast<std::int64_t>(storage->coarse.size() / (2 * n_pairs));
  layer->rope.interleaved = plan.rope_style == KVRT_ROPE_INTERLEAVED;
  layer->rope_tile.resize(n_pairs * 2 * kRopeTile);
  rope_tile_table(layer->rope, layer->rope_tile.data());
  const int spread = plan.units[KVRT_K].spread;
  for (int i = 0; spread != 0 && i < layer->rope.n_pairs; ++i) {
    layer->pair_places.push_back(stored_position(spread, plan.layout.head_dim, rope_first(layer->rope, i)));
    layer->pair_places.push_back(stored_position(spread, plan.layout.head_dim, rope_second(layer->rope, i)));
  }
}

Status Context::add_layer(const LayerPlan& plan, Needs needs, LayerContext* layer) {
  layer->plan = &plan;
  layer->layout = plan.layout;
  layer->group = plan.n_q_heads / plan.layout.n_kv_heads;
  for (const CacheSide side : {CacheSide::kK, CacheSide::kV}) {
    if (const std::string text = missing_part(*plan_, plan, side); !text.empty()) {
      const std::string nearest = nearest_offered(*plan_, plan, side);
      return Status(Code::kUnsupported, unit_name(plan, side) + ": " + text + (nearest.empty() ? "" : "; nearest: " + nearest));
    }
  }
  if (limits_.n_kv_heads > 0) {
    if (limits_.first_kv_head > plan.layout.n_kv_heads - limits_.n_kv_heads) {
      return Status(Code::kMismatch, "layer " + std::to_string(plan.index) + " has " + std::to_string(plan.layout.n_kv_heads) + " KV heads, limits ask for " +
                                         std::to_string(limits_.first_kv_head) + " + " + std::to_string(limits_.n_kv_heads));
    }
    layer->layout.n_kv_heads = limits_.n_kv_heads;
  }
  add_rope(plan, layer);
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    if (Status status = add_unit(plan, side, layer); !status.ok()) return status;
  }
  const char* path = "fused";
  if (backend_ == KVRT_BACKEND_CUDA) {
    if (layer->layout.head_dim > kMaxDeviceDim) {
      return Status(Code::kUnsupported, layer->units[KVRT_K].name + ": head_dim on cuda is at most " + std::to_string(kMaxDeviceDim) + ", got " +
                                            std::to_string(layer->layout.head_dim));
    }
    layer->cuda = cuda_path(layer->units[KVRT_K].codecs[0], layer->units[KVRT_V].codecs[0], layer->units[KVRT_K].pre ? &layer->rope : nullptr);
    if (layer->cuda.path == KVRT_PATH_MISSING && needs == Needs::kAll)
      return Status(Code::kUnsupported, layer->units[layer->cuda.side].name + ": " + layer->cuda.reason);
    if (layer->cuda.path == KVRT_PATH_TWO_PASS && !limits_.accept_two_pass && needs == Needs::kAll) {
      return Status(Code::kUnsupported, "layer " + std::to_string(plan.index) + ": K " + plan.units[KVRT_K].text + " with V " + plan.units[KVRT_V].text +
                                            " has no fused kernel; set accept_two_pass in the limits to run it in two passes");
    }
    path = layer->cuda.path == KVRT_PATH_FUSED ? "fused" : layer->cuda.path == KVRT_PATH_TWO_PASS ? "two_pass" : "missing";
  }
  layer->description = "layer " + std::to_string(plan.index) + ": " + backend_name(backend_) + (decode_path_.name ? std::string(" ") + decode_path_.name : "") +
                       ", K " + plan.units[KVRT_K].text + ", V " + plan.units[KVRT_V].text + ", decode " + path;
  if (backend_ == KVRT_BACKEND_CUDA) {
    worker_bytes_ = std::max({worker_bytes_, append_device_bytes(*layer, limits_), decode_device_bytes(*layer, limits_, n_processors_),
                              gather_device_bytes(*layer, limits_), verify_device_bytes(*layer, limits_)});
    return {};
  }
  worker_bytes_ = std::max({worker_bytes_, reference_workspace_bytes(*layer), backend_ == KVRT_BACKEND_CPU ? decode_worker_bytes(*layer) : 0});
  if (write_path(*layer)) worker_bytes_ = std::max(worker_bytes_, append_scratch_bytes(*layer));
  if (backend_ == KVRT_BACKEND_CPU) shared_bytes_ = std::max(shared_bytes_, decode_shared_bytes(*layer, limits_));
  return {};
}

Status Context::add_device() {
  if (Status status = DeviceTables::make(device_.index, layers_, &tables_); !status.ok()) return status;
  for (std::size_t l = 0; l < layers_.size(); ++l) layers_[l].on_device = tables_->layer(l);
  return {};
}

Status Context::read_health(const LayerContext& layer, kvrt_side side, kvrt_health* out) const {
  const Health& h = health(layer, side);
  *out = {h.tokens.load(), h.non_finite.load(), h.saturated.load(), h.floored.load()};
  if (!tables_) return {};
  DeviceCounters counters;
  if (Status status = tables_->read_counters(static_cast<std::size_t>(&layer - layers_.data()), &counters); !status.ok()) return keep_driver_error(*this, status);
  out->non_finite += counters.counts[side][0], out->saturated += counters.counts[side][1], out->floored += counters.counts[side][2];
  return {};
}

Status Context::make(const Plan& plan, const kvrt_device& device, const kvrt_limits& limits, Context* out, Needs needs) {
  out->limits_ = limits;
  if (limits.max_q_len == 0) out->limits_.max_q_len = 1;
  if (limits.n_workers == 0) out->limits_.n_workers = 1;
  if (Status status = check_limits(out->limits_); !status.ok()) return status;
  if (Status status = choose_backend(device, &out->backend_); !status.ok()) return status;
  out->device_ = device;
  if (out->backend_ == KVRT_BACKEND_CUDA) {
    DeviceProperties properties;
    if (Status status = open_device(device.index, &properties); !status.ok()) return status;
    out->n_processors_ = properties.n_processors;
    out->limits_.n_workers = 1;  // the device shares the work itself
  }
  out->driver_error_ = std::make_unique<DriverError>();
  if (out->backend_ == KVRT_BACKEND_CPU) {
    if (Status status = choose_decode_backend(&out->decode_path_); !status.ok()) return status;
    for (const WritePath& path : write_paths()) {
      if (std::string_view(path.name) == out->decode_path_.name) out->write_path_ = path;
    }
  }
  out->plan_ = std::make_unique<Plan>(plan);
  out->layers_.resize(plan.layers.size());
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    if (Status status = out->add_layer(out->plan_->layers[l], needs, &out->layers_[l]); !status.ok()) return status;
  }
  out->health_ = std::make_unique<Health[]>(plan.layers.size() * KVRT_SIDES);
  out->worker_bytes_ = (out->worker_bytes_ + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
  if (__builtin_mul_overflow(out->worker_bytes_, std::int64_t{out->limits_.n_workers}, &out->workspace_bytes_) ||
      __builtin_add_overflow(out->workspace_bytes_, kWorkspaceAlign + out->shared_bytes_, &out->workspace_bytes_)) {
    return Status(Code::kCapacity, "limits: n_workers " + std::to_string(out->limits_.n_workers) + " needs a workspace beyond 2^63 bytes");
  }
  return out->backend_ == KVRT_BACKEND_CUDA ? out->add_device() : Status();
}

const WritePath* Context::write_path(const LayerContext& layer) const {
  return write_path_.name && layer.layout.head_dim % 16 == 0 ? &write_path_ : nullptr;
}

const LayerContext* Context::find(int layer) const {
  const auto it = std::lower_bound(layers_.begin(), layers_.end(), layer, [](const LayerContext& l, int index) { return l.plan->index < index; });
  return it != layers_.end() && it->plan->index == layer ? &*it : nullptr;
}

Health& Context::health(const LayerContext& layer, kvrt_side side) const {
  return health_[static_cast<std::size_t>(&layer - layers_.data()) * KVRT_SIDES + static_cast<std::size_t>(side)];
}

}  // namespace kvrt
