#include "kernels/write/fake_quant.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/codec/page_codec.h"
#include "kernels/write/write_path.h"

namespace kvrt {
namespace {

/// Tokens that one piece of parallel work handles, in whole runs.
constexpr std::int64_t kPieceTokens = 256;

bool all_finite(const float* x, std::int64_t n) {
  return std::all_of(x, x + n, [](float v) { return f32_is_finite(v); });
}

bool is_permutation(const std::int32_t* order, int n) {
  std::vector<bool> seen(static_cast<std::size_t>(n), false);
  for (int i = 0; i < n; ++i) {
    if (order[i] < 0 || order[i] >= n || seen[static_cast<std::size_t>(order[i])]) return false;
    seen[static_cast<std::size_t>(order[i])] = true;
  }
  return true;
}

Status bad_argument(const Scheme& scheme, const std::string& text) {
  return Status(Code::kArgument, "fake_quant " + to_string(scheme) + ": " + text);
}

/// Static ranges that the plan holds: of the unit, of a head, of a channel.
std::int64_t n_thresholds(const Scheme& s, int n_heads, int head_dim) {
  switch (s.granularity) {
    case Granularity::kTensor: return 1;
    case Granularity::kHead: return n_heads;
    case Granularity::kChannelStatic: return static_cast<std::int64_t>(n_heads) * head_dim;
    default: return s.format == Format::kNvfp4 ? 1 : 0;
  }
}

Status check_thresholds(const FakeQuantArgs& a) {
  const Scheme& s = a.scheme;
  const std::int64_t n = n_thresholds(s, a.n_heads, a.head_dim);
  if (n == 0) return {};
  if (is_fp8(s.format) || is_fp4(s.format)) {
    if (!a.clip_hi) return bad_argument(s, "clip_hi is missing; expected " + std::to_string(n) + " absolute maxima");
    for (std::int64_t i = 0; i < n; ++i) {
      if (!f32_is_finite(a.clip_hi[i]) || a.clip_hi[i] < 0) {
        return bad_argument(s, "clip_hi[" + std::to_string(i) + "] must be finite and not negative");
      }
    }
    return {};
  }
  for (const auto& [name, values] : {std::pair("clip_lo", a.clip_lo), std::pair("clip_hi", a.clip_hi)}) {
    if (!values) return bad_argument(s, std::string(name) + " is missing; expected " + std::to_string(n) + " thresholds");
  }
  for (std::int64_t i = 0; i < n; ++i) {
    if (!f32_is_finite(a.clip_lo[i]) || !f32_is_finite(a.clip_hi[i]) || !f32_is_finite(a.clip_hi[i] - a.clip_lo[i]) || a.clip_lo[i] > a.clip_hi[i]) {
      return bad_argument(s, "clip_lo[" + std::to_string(i) + "] and clip_hi[" + std::to_string(i) + "] must be finite, in order, and a finite distance apart");
    }
  }
  return {};
}

void set_ranges(const FakeQuantArgs& a, FakeQuantJob* job) {
  const std::int64_t n = n_thresholds(a.scheme, a.n_heads, a.head_dim);
  for (std::int64_t i = 0; i < n; ++i) {
    const StaticRange r = static_range(a.scheme.format, a.clip_lo ? a.clip_lo[i] : 0.0f, a.clip_hi[i]);
    job->range_lo.push_back(r.lo), job->range_scale.push_back(r.scale);
    job->range_min.push_back(r.min), job->range_max.push_back(r.max);
  }
}

bool is_stored_codebook(const float* entries, int size) {
  if (!all_finite(entries, size) || !std::is_sorted(entries, entries + size)) return false;
  const double step = std::max(std::abs(static_cast<double>(entries[0])), std::abs(static_cast<double>(entries[size - 1]))) / 127;
  return step > 0 && std::all_of(entries, entries + size, [&](float e) { return std::abs(e / step - std::round(e / step)) < 1e-3; });
}

Status check_feedback(const FakeQuantArgs& a) {
  const Scheme& s = a.scheme;
  if (!s.ef) return {};
  if (!a.ef_u) return bad_argument(s, "ef_u is missing; expected [n_heads, head_dim (head_dim + 1) / 2] floats");
  if (!a.ef_order) return bad_argument(s, "ef_order is missing; expected [n_heads, head_dim] channels");
  const std::int64_t d = a.head_dim, triangle = d * (d + 1) / 2;
  for (std::int64_t h = 0; h < a.n_heads; ++h) {
    const std::string head = " of head " + std::to_string(h);
    if (!all_finite(a.ef_u + h * triangle, triangle)) return bad_argument(s, "ef_u" + head + " holds a value that is not finite");
    const float* diagonal = a.ef_u + h * triangle;
    for (std::int64_t i = 0; i < d; diagonal += d - i, ++i) {
      if (!(*diagonal > 0)) return bad_argument(s, "ef_u" + head + ": diagonal element " + std::to_string(i) + " must be positive");
    }
    if (!is_permutation(a.ef_order + h * d, a.head_dim)) return bad_argument(s, "ef_order" + head + " is not a permutation of the channels");
  }
  return {};
}

bool has_groups(const Scheme& s) { return s.granularity == Granularity::kToken || s.granularity == Granularity::kChannel; }

/// clip and pair: what they need to know of groups.
Status check_groups(const FakeQuantArgs& a) {
  const Scheme& s = a.scheme;
  if (s.clip && has_groups(s)) {
    if (!a.clip_alpha) return bad_argument(s, "clip_alpha is missing; expected 1 number");
    if (!(*a.clip_alpha > 0 && *a.clip_alpha <= 1))
      return bad_argument(s, "clip_alpha is " + std::to_string(*a.clip_alpha) + ", expected more than 0 and at most 1");
  }
  if (!s.pair) return {};
  if (a.rotary_dim < 2 || a.rotary_dim % 2 != 0 || a.rotary_dim > a.head_dim) {
    return bad_argument(s, "rotary_dim is " + std::to_string(a.rotary_dim) + "; pair needs the channels that RoPE turns, an even number up to head_dim");
  }
  const int group = s.group == 0 ? a.head_dim : s.group;
  if (s.granularity == Granularity::kToken && !pairs_map_groups(a.rotary_dim, a.interleaved, a.head_dim, group)) {
    return bad_argument(s, "pair: RoPE pairs of " + std::to_string(a.rotary_dim) + " channels do not map groups of " + std::to_string(group) + " onto groups");
  }
  return {};
}

Status check_constants(const FakeQuantArgs& a) {
  const Scheme& s = a.scheme;
  const std::int64_t values = static_cast<std::int64_t>(a.n_heads) * a.head_dim;
  if (s.center) {
    if (!a.mean) return bad_argument(s, "mean is missing; expected [n_heads, head_dim] floats");
    if (!all_finite(a.mean, values)) return bad_argument(s, "mean holds a value that is not finite");
  }
  if (s.smooth) {
    if (!a.smooth) return bad_argument(s, "smooth is missing; expected [n_heads, head_dim] factors");
    for (std::int64_t i = 0; i < values; ++i) {
      if (!f32_is_finite(a.smooth[i]) || !(a.smooth[i] > 0)) return bad_argument(s, "smooth[" + std::to_string(i) + "] must be finite and positive");
    }
  }
  if (s.lowrank) {
    const std::int64_t n_basis = values * s.lowrank;
    const std::string d = "head_dim", r = std::to_string(s.lowrank);
    const struct {
      const char* name;
      const float* given;
      std::int64_t n;
      std::string shape;
    } arrays[] = {{"basis_mean", a.basis_mean, values, d}, {"basis_in", a.basis_in, n_basis, d + ", " + r}, {"basis", a.basis, n_basis, r + ", " + d}};
    for (const auto& array : arrays) {
      if (!array.given) return bad_argument(s, std::string(array.name) + " is missing; expected [n_heads, " + array.shape + "] floats");
      if (!all_finite(array.given, array.n)) return bad_argument(s, std::string(array.name) + " holds a value that is not finite");
    }
  }
  if (Status status = check_thresholds(a); !status.ok()) return status;
  if (is_nuq(s.format)) {
    const int size = 1 << code_bits(s.format);
    if (!a.codebook) return bad_argument(s, "codebook is missing; expected " + std::to_string(size) + " entries");
    if (!is_stored_codebook(a.codebook, size)) return bad_argument(s, "codebook must hold ascending finite entries, each a whole multiple of largest / 127");
  }
  if (Status status = check_feedback(a); !status.ok()) return status;
  if (Status status = check_groups(a); !status.ok()) return status;
  if (a.block_order) {
    if (!is_llamacpp_block(s.format)) return bad_argument(s, "block_order is for the blocks of llama.cpp only");
    if (!is_permutation(a.block_order, a.head_dim)) {
      return bad_argument(s, "block_order is not a permutation of 0.." + std::to_string(a.head_dim - 1));
    }
  }
  return {};
}

}  // namespace

StaticGrids static_grids(const FakeQuantJob& job, int head) {
  const std::int32_t* const partner = job.partner.empty() ? nullptr : job.partner.data();
  if (job.range_lo.empty()) return {nullptr, nullptr, nullptr, nullptr, partner};
  const Granularity granularity = job.scheme.granularity;
  const std::int64_t at = granularity == Granularity::kHead ? head
                          : granularity == Granularity::kChannelStatic ? static_cast<std::int64_t>(head) * job.head_dim : 0;
  return {&job.range_lo[at], &job.range_scale[at], &job.range_min[at], &job.range_max[at], partner};
}

PageCodec page_codec_of(const FakeQuantJob& job, int page_tokens) {
  PageCodec codec = make_page_codec(job.scheme, job.bits, job.width, page_tokens);
  codec.codebook = job.codebook;
  codec.clip_alpha = job.clip_alpha;
  codec.rotary_dim = job.rotary_dim, codec.interleaved = job.interleaved;
  return codec;
}

Status make_fake_quant_job(const FakeQuantArgs& a, FakeQuantJob* job) {
  const Scheme& s = a.scheme;
  if (a.n_tokens < 0 || a.n_heads < 1) return bad_argument(s, "n_tokens must be >= 0 and n_heads >= 1");
  if (const std::string text = check_shape(s, a.head_dim, a.is_key); !text.empty()) return bad_argument(s, text);
  if (a.n_tokens > 0 && (!a.x || !a.out)) return bad_argument(s, "x or out is null");
  const std::int64_t dense = static_cast<std::int64_t>(a.n_heads) * a.head_dim;
  job->x_stride = a.x_token_stride ? a.x_token_stride : dense;
  job->out_stride = a.out_token_stride ? a.out_token_stride : dense;
  if (job->x_stride < dense || job->out_stride < dense) {
    return bad_argument(s, "a token stride is below n_heads * head_dim = " + std::to_string(dense));
  }
  if (a.x == a.out && job->x_stride != job->out_stride) return bad_argument(s, "in place, both strides must be equal");
  if (s.granularity == Granularity::kChannel && a.n_tokens % s.group != 0) {
    return bad_argument(s, "n_tokens " + std::to_string(a.n_tokens) + " is not a multiple of the channel group " + std::to_string(s.group) +
                               "; a partial group is never quantised");
  }
  if (a.page_tokens != 32 && a.page_tokens != 64 && a.page_tokens != 128)
    return bad_argument(s, "page_tokens is " + std::to_string(a.page_tokens) + ", expected 32, 64 or 128");
  if (Status status = check_constants(a); !status.ok()) return status;

  job->scheme = s;
  job->bits = code_bits(s.format);
  job->width = s.lowrank ? s.lowrank : a.head_dim;
  job->group = is_fp4(s.format) ? fp4_block(s.format) : s.granularity == Granularity::kToken && s.group == 0 ? job->width : s.group;
  job->n_heads = a.n_heads, job->head_dim = a.head_dim, job->n_tokens = a.n_tokens;
  job->x = a.x, job->out = a.out;
  job->round_input_to_bf16 = a.round_input_to_bf16;
  job->block_order = a.block_order;
  job->mean = s.center ? a.mean : s.lowrank ? a.basis_mean : nullptr;
  job->smooth = s.smooth ? a.smooth : nullptr;
  if (s.lowrank) job->basis_in = a.basis_in, job->basis = a.basis;
  set_ranges(a, job);
  if (is_lm(s.format)) job->codebook = lloyd_max_codebook(s.format);
  if (is_nuq(s.format)) job->codebook = codebook_of_entries(a.codebook, 1 << code_bits(s.format));
  if (s.clip && has_groups(s)) job->clip_alpha = *a.clip_alpha;
  if (s.pair) job->rotary_dim = a.rotary_dim, job->interleaved = a.interleaved;
  if (s.pair && has_groups(s)) {
    const int width = s.granularity == Granularity::kToken ? job->group : 1;
    for (int d = 0; d < a.head_dim; d += width) job->partner.push_back(rope_partner(a.rotary_dim, a.interleaved, d) / width);
  }
  job->page_tokens = std::max(a.page_tokens, s.granularity == Granularity::kChannel ? s.group : 1);
  if (s.ef) job->ef_u = a.ef_u, job->ef_order = a.ef_order;
  if (s.had) {
    job->had = is_llamacpp_block(s.format) ? llamacpp_hadamard_order(a.head_dim, a.is_key) : hadamard_order(a.head_dim);
    job->had_scale = hadamard_scale(job->had);
    for (int i = 0; job->had.base > 1 && i < job->had.base; ++i) {
      job->paley[i] = paley_row(job->had.base, i, false);
      job->paley_transposed[i] = paley_row(job->had.base, i, true);
    }
  }
  return {};
}

Status fake_quant_on(const FakeQuantArgs& args, const WritePath& path, FakeQuantCounters* counters) {
  FakeQuantJob job;
  if (Status status = make_fake_quant_job(args, &job); !status.ok()) return status;
  if (job.n_tokens == 0) return {};
  const std::int64_t run = rows_per_run(job), piece = std::max<std::int64_t>(run, kPieceTokens / run * run);
  const std::int64_t pieces_per_head = (job.n_tokens + piece - 1) / piece, n_pieces = pieces_per_head * job.n_heads;
  std::vector<FakeQuantCounters> counts(static_cast<std::size_t>(n_pieces));
  const auto body = [&](std::int64_t i) {
    const int head = static_cast<int>(i % job.n_heads);
    const std::int64_t begin = i / job.n_heads * piece, end = std::min(job.n_tokens, begin + piece);
    const StaticGrids grids = static_grids(job, head);
    std::vector<float> scratch(static_cast<std::size_t>(scratch_floats(job)));
    for (std::int64_t t = begin; t < end; t += run) {
      path.fake_quant(job, grids, head, t, static_cast<int>(std::min(run, end - t)), scratch.data(), &counts[static_cast<std::size_t>(i)]);
    }
  };
  if (args.parallel_for && *args.parallel_for) {
    (*args.parallel_for)(n_pieces, body);
  } else {
    for (std::int64_t i = 0; i < n_pieces; ++i) body(i);
  }
  if (counters) {
    for (const FakeQuantCounters& c : counts) {
      counters->non_finite += c.non_finite, counters->saturated += c.saturated, counters->floored += c.floored;
    }
  }
  return {};
}

Status fake_quant(const FakeQuantArgs& args, FakeQuantCounters* counters) {
  const std::vector<WritePath> paths = write_paths();
  const char* forced = std::getenv("KVRT_FORCE_BACKEND");
  if (!forced || !*forced || std::string_view(forced) == "cpu") return fake_quant_on(args, paths.back(), counters);
  if (std::string_view(forced) == "ref") return fake_quant_reference(args, counters);
  std::string names = "ref";
  for (const WritePath& p : paths) {
    if (std::string_view(forced) == p.name) return fake_quant_on(args, p, counters);
    names += std::string(" ") + p.name;
  }
  return Status(Code::kUnsupported, "KVRT_FORCE_BACKEND is '" + std::string(forced) + "'; this CPU and build offer " + names);
}

}  // namespace kvrt
