#include "libcalib/stats/kv_stats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "libcalib/base/error.h"

namespace calib::stats {
namespace {

constexpr int kKvMantissaBits = 6, kQueryMantissaBits = 4;

struct Fault {
  std::int64_t token = 0;
  int channel = 0;
};

LayerStats::Split make_split(int n_heads, int head_dim, int mantissa_bits) {
  return {TensorStats(n_heads, head_dim, mantissa_bits), TensorStats(n_heads, head_dim, mantissa_bits)};
}

// Envelope of one head over its RoPE pairs; channels past the rotary part pair with their neighbour.
void update_envelope(const LayerGeometry& geometry, const float* x, std::int64_t n_tokens, std::int64_t stride, float* envelope) {
  const int half = geometry.head_dim / 2;
  const int n_pairs = geometry.rope_style == RopeStyle::kNone ? 0 : geometry.rotary_dim / 2;
  const bool interleaved = geometry.rope_style == RopeStyle::kInterleaved;
  std::vector<float> square(static_cast<std::size_t>(half), 0.0f);
  for (std::int64_t t = 0; t < n_tokens; ++t) {
    const float* row = x + t * stride;
    if (interleaved)
      for (int i = 0; i < n_pairs; ++i) square[i] = std::max(square[i], row[2 * i] * row[2 * i] + row[2 * i + 1] * row[2 * i + 1]);
    else
      for (int i = 0; i < n_pairs; ++i) square[i] = std::max(square[i], row[i] * row[i] + row[i + n_pairs] * row[i + n_pairs]);
    for (int i = n_pairs; i < half; ++i) {
      const float larger = std::max(std::fabs(row[2 * i]), std::fabs(row[2 * i + 1]));
      square[i] = std::max(square[i], larger * larger);
    }
  }
  for (int i = 0; i < half; ++i) envelope[i] = std::max(envelope[i], std::sqrt(square[i]));
}

}  // namespace

LayerStats::LayerStats(const LayerGeometry& geometry, std::int64_t n_sinks)
    : k_pre(make_split(geometry.n_kv_heads, geometry.head_dim, kKvMantissaBits)), k_post(k_pre), v(k_pre),
      q_pre(make_split(geometry.n_q_heads, geometry.head_dim, kQueryMantissaBits)), q_post(q_pre),
      query_moment(geometry.n_kv_heads, geometry.head_dim, false, geometry.n_q_heads / geometry.n_kv_heads),
      query_cov(geometry.n_q_heads, geometry.head_dim, true), key_cov(geometry.n_kv_heads, geometry.head_dim, true),
      value_cov(geometry.n_kv_heads, geometry.head_dim, true),
      pair_absmax(static_cast<std::size_t>(geometry.n_kv_heads) * static_cast<std::size_t>(geometry.head_dim / 2), 0.0f),
      attention(geometry.n_q_heads), geometry_(geometry), n_sinks_(n_sinks) {
  CALIB_CHECK(n_sinks >= 0 && geometry.n_q_heads % geometry.n_kv_heads == 0);
}

void LayerStats::add_document(const DocumentTensors& document, ThreadPool& pool) {
  const std::int64_t n = document.n_tokens, n_sink = std::min(n_sinks_, n), n_body = n - n_sink;
  const int d = geometry_.head_dim, n_kv = geometry_.n_kv_heads, n_q = geometry_.n_q_heads, group = n_q / n_kv;

  struct Captured {
    const char* name;
    const float* x;
    int n_heads;
    Split* split;
  };
  const std::array<Captured, 5> tensors = {{{"k_pre", document.k_pre, n_kv, &k_pre},
                                            {"k_post", document.k_post, n_kv, &k_post},
                                            {"v", document.v, n_kv, &v},
                                            {"q_pre", document.q_pre, n_q, &q_pre},
                                            {"q_post", document.q_post, n_q, &q_post}}};
  const auto stride_of = [&](int n_heads) { return static_cast<std::int64_t>(n_heads) * d; };

  // One job per head of each tensor: jobs write to disjoint places, so their order does not matter.
  struct Job {
    const Captured* tensor;
    int head;
    std::optional<Fault> fault;
  };
  std::vector<Job> jobs;
  for (const Captured& tensor : tensors)
    for (int h = 0; h < tensor.n_heads; ++h) jobs.push_back({&tensor, h, std::nullopt});
  pool.parallel_for(static_cast<std::int64_t>(jobs.size()), [&](std::int64_t i) {
    Job& job = jobs[static_cast<std::size_t>(i)];
    const std::int64_t stride = stride_of(job.tensor->n_heads);
    const float* x = job.tensor->x + static_cast<std::int64_t>(job.head) * d;
    const float* body = x + n_sink * stride;
    if (const auto bad = job.tensor->split->sink.add_head(job.head, x, n_sink, stride)) {
      job.fault = Fault{bad->token, bad->channel};
    } else if (const auto bad_body = job.tensor->split->body.add_head(job.head, body, n_body, stride)) {
      job.fault = Fault{n_sink + bad_body->token, bad_body->channel};
    }
  });
  const Job* worst = nullptr;
  for (const Job& job : jobs)
    if (job.fault && (worst == nullptr || job.fault->token < worst->fault->token)) worst = &job;
  if (worst != nullptr) {
    const Captured& tensor = *worst->tensor;
    const float value = tensor.x[worst->fault->token * stride_of(tensor.n_heads) + worst->head * d + worst->fault->channel];
    fail(ErrorKind::kNumeric, fmt::format("{}, head {}, channel {}, position {}", tensor.name, worst->head, worst->fault->channel, worst->fault->token),
         "value is {}, expected a finite number; the weights or the compute dtype are at fault",
         std::isnan(value) ? "NaN" : value > 0 ? "infinity" : "-infinity");
  }

  const auto body_of = [&](const float* x, int n_heads, int head) { return x + n_sink * stride_of(n_heads) + static_cast<std::int64_t>(head) * d; };
  pool.parallel_for(n_q + 3 * n_kv, [&](std::int64_t i) {
    const int job = static_cast<int>(i);
    if (job < n_q) {
      query_cov.add_rows(job, body_of(document.q_pre, n_q, job), n_body, stride_of(n_q));
    } else if (job < n_q + n_kv) {
      const int h = job - n_q;
      for (int g = 0; g < group; ++g) query_moment.add_rows(h, body_of(document.q_post, n_q, h * group + g), n_body, stride_of(n_q));
    } else if (job < n_q + 2 * n_kv) {
      const int h = job - n_q - n_kv;
      const float* keys = body_of(document.k_pre, n_kv, h);
      key_cov.add_rows(h, keys, n_body, stride_of(n_kv));
      update_envelope(geometry_, keys, n_body, stride_of(n_kv), pair_absmax.data() + static_cast<std::size_t>(h) * static_cast<std::size_t>(d / 2));
    } else {
      const int h = job - n_q - 2 * n_kv;
      value_cov.add_rows(h, body_of(document.v, n_kv, h), n_body, stride_of(n_kv));
    }
  });
}

void LayerStats::add_attention(const SampledRows& rows, std::int64_t n_tokens, ThreadPool& pool) {
  CALIB_CHECK(rows.rows.size() == rows.row_weight.size());
  if (rows.rows.empty()) return;
  CALIB_CHECK(rows.rows.front() >= 0 && rows.rows.back() < n_tokens);
  attention.reserve_buckets(position_bucket(rows.rows.back()) + 1);
  const std::int64_t head_stride = static_cast<std::int64_t>(rows.rows.size()) * n_tokens;
  pool.parallel_for(geometry_.n_q_heads, [&](std::int64_t h) {
    attention.add_head(static_cast<int>(h), rows, rows.p + h * head_stride, n_tokens, geometry_.sliding_window, n_sinks_);
  });
}

void LayerStats::merge(const LayerStats& other) {
  CALIB_CHECK(geometry_.index == other.geometry_.index && n_sinks_ == other.n_sinks_);
  const auto merge_split = [](Split& a, const Split& b) {
    a.body.merge(b.body);
    a.sink.merge(b.sink);
  };
  merge_split(k_pre, other.k_pre);
  merge_split(k_post, other.k_post);
  merge_split(v, other.v);
  merge_split(q_pre, other.q_pre);
  merge_split(q_post, other.q_post);
  query_moment.merge(other.query_moment);
  query_cov.merge(other.query_cov);
  key_cov.merge(other.key_cov);
  value_cov.merge(other.value_cov);
  for (std::size_t i = 0; i < pair_absmax.size(); ++i) pair_absmax[i] = std::max(pair_absmax[i], other.pair_absmax[i]);
  attention.merge(other.attention);
  if (output_moment.empty()) output_moment = other.output_moment;
}

}  // namespace calib::stats
