#pragma once
// Input data and a compact way to call fake_quant, shared by the tests of kvrt.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/static_range.h"
#include "kernels/write/write_path.h"
#include "libcalib/base/rng.h"

namespace kvrt::testing {

inline Scheme parse(const std::string& text) {
  Scheme s;
  std::string error;
  EXPECT_TRUE(parse_scheme(text, &s, &error)) << text << ": " << error;
  return s;
}

/// One call with its own storage: x, out [T, H, D].
struct Call {
  Scheme scheme;
  int n_heads, head_dim;
  std::int64_t n_tokens;
  std::vector<float> x, mean, smooth, clip_lo, clip_hi, clip_alpha, codebook, ef_u, basis_mean, basis_in, basis;
  std::vector<std::int32_t> block_order, ef_order;
  int rotary_dim = 0;  ///< 0 = head_dim
  bool is_key = true, bf16 = false, interleaved = false;

  Call(const std::string& text, std::int64_t tokens, int heads, int dim)
      : scheme(parse(text)), n_heads(heads), head_dim(dim), n_tokens(tokens),
        x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads * dim), 0.0f) {
    if (scheme.center) mean.assign(static_cast<std::size_t>(heads * dim), 0.25f);
    if (scheme.granularity == Granularity::kTensor || scheme.format == Format::kNvfp4) set_thresholds(1, 3.0f);
    if (scheme.granularity == Granularity::kHead) set_thresholds(static_cast<std::size_t>(heads), 2.5f);
    if (scheme.granularity == Granularity::kChannelStatic) set_thresholds(static_cast<std::size_t>(heads * dim), 2.0f);
    if (is_nuq(scheme.format)) {
      const int size = 1 << code_bits(scheme.format), reach = size - 1;
      for (int i = 0; i < size; ++i)
        codebook.push_back(std::round(127.0f * static_cast<float>((2 * i - reach) * std::abs(2 * i - reach)) / static_cast<float>(reach * reach)) *
                           (0.93f / 127.0f));
    }
    if (scheme.clip) clip_alpha.push_back(0.8f);
    if (scheme.ef) set_feedback();
    if (scheme.lowrank) set_basis();
    for (int i = 0; scheme.smooth && i < heads * dim; ++i) smooth.push_back(0.5f + 0.03f * static_cast<float>(i % dim % (dim / 2)));
  }

  /// An upper triangle with correlations that fade, and channels walked backwards.
  void set_feedback() {
    for (int h = 0; h < n_heads; ++h) {
      for (int i = 0; i < head_dim; ++i) {
        ef_order.push_back((head_dim - 1 - i + h) % head_dim);
        for (int j = i; j < head_dim; ++j)
          ef_u.push_back(j == i ? 1.0f + 0.01f * static_cast<float>(i) : 0.3f * std::cos(static_cast<float>(3 * i + j)) / static_cast<float>(1 + j - i));
      }
    }
  }
  /// r of the vectors of an orthonormal matrix (of cosines), stretched on the way in and shrunk on the way out.
  void set_basis() {
    const int r = scheme.lowrank;
    is_key = scheme.pre;
    for (int h = 0; h < n_heads; ++h) {
      const auto vector = [&](int i, int c) { return std::sqrt((i == 0 ? 1.0 : 2.0) / head_dim) * std::cos(M_PI * i * (c + 0.5) / head_dim); };
      const auto stretch = [&](int i) { return 1.0 + 0.125 * ((i + h) % 5); };
      for (int c = 0; c < head_dim; ++c) basis_mean.push_back(0.5f - 0.01f * static_cast<float>((c + h) % 7));
      for (int c = 0; c < head_dim; ++c) {
        for (int i = 0; i < r; ++i) basis_in.push_back(static_cast<float>(vector(i, c) * stretch(i)));
      }
      for (int i = 0; i < r; ++i) {
        for (int c = 0; c < head_dim; ++c) basis.push_back(static_cast<float>(vector(i, c) / stretch(i)));
      }
    }
  }
  void set_thresholds(std::size_t n, float first) {
    for (std::size_t i = 0; i < n; ++i) clip_hi.push_back(first + 0.01f * static_cast<float>(i)), clip_lo.push_back(0.25f - clip_hi.back());
  }
  /// What an encoder of head 0 is given.
  std::vector<StaticRange> ranges() const {
    std::vector<StaticRange> list;
    for (std::size_t i = 0; i < clip_hi.size(); ++i) list.push_back(static_range(scheme.format, clip_lo[i], clip_hi[i]));
    return list;
  }

  void fill_normal(std::uint64_t seed, double scale = 1, double offset = 0) {
    calib::Rng rng(seed);
    for (float& v : x) v = static_cast<float>(offset + scale * rng.normal());
  }

  FakeQuantArgs args(float* out) const {
    FakeQuantArgs a;
    a.scheme = scheme;
    a.is_key = is_key;
    a.n_tokens = n_tokens, a.n_heads = n_heads, a.head_dim = head_dim;
    a.x = x.data(), a.out = out;
    a.round_input_to_bf16 = bf16;
    a.mean = mean.empty() ? nullptr : mean.data();
    a.clip_alpha = clip_alpha.empty() ? nullptr : clip_alpha.data();
    a.rotary_dim = scheme.pair ? rotary_dim ? rotary_dim : head_dim : 0, a.interleaved = interleaved;
    a.codebook = codebook.empty() ? nullptr : codebook.data();
    a.ef_u = ef_u.empty() ? nullptr : ef_u.data();
    a.ef_order = ef_order.empty() ? nullptr : ef_order.data();
    a.basis_mean = basis_mean.empty() ? nullptr : basis_mean.data();
    a.basis_in = basis_in.empty() ? nullptr : basis_in.data();
    a.basis = basis.empty() ? nullptr : basis.data();
    a.smooth = smooth.empty() ? nullptr : smooth.data();
    a.clip_lo = clip_lo.empty() ? nullptr : clip_lo.data();
    a.clip_hi = clip_hi.empty() ? nullptr : clip_hi.data();
    a.block_order = block_order.empty() ? nullptr : block_order.data();
    return a;
  }
  std::vector<float> run(FakeQuantCounters* counters = nullptr) const {
    std::vector<float> out(x.size(), NAN);
    const Status status = fake_quant(args(out.data()), counters);
    EXPECT_TRUE(status.ok()) << status.text();
    return out;
  }
  std::vector<float> reference(FakeQuantCounters* counters = nullptr) const {
    std::vector<float> out(x.size(), NAN);
    const Status status = fake_quant_reference(args(out.data()), counters);
    EXPECT_TRUE(status.ok()) << status.text();
    return out;
  }
  std::vector<float> on(const WritePath& backend, FakeQuantCounters* counters = nullptr) const {
    std::vector<float> out(x.size(), NAN);
    const Status status = fake_quant_on(args(out.data()), backend, counters);
    EXPECT_TRUE(status.ok()) << status.text();
    return out;
  }
};

inline double mse(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return sum / static_cast<double>(a.size());
}

}  // namespace kvrt::testing
