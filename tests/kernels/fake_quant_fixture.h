#pragma once
// Input data and a compact way to call fake_quant, shared by the tests of kvrt.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/write/fake_quant_job.h"
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
  std::vector<float> x, mean, clip_hi;
  std::vector<std::int32_t> block_order;
  bool is_key = true, bf16 = false;

  Call(const std::string& text, std::int64_t tokens, int heads, int dim)
      : scheme(parse(text)), n_heads(heads), head_dim(dim), n_tokens(tokens),
        x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads * dim), 0.0f) {
    if (scheme.center) mean.assign(static_cast<std::size_t>(heads * dim), 0.25f);
    if (scheme.granularity == Granularity::kTensor) clip_hi.assign(1, 3.0f);
    if (scheme.granularity == Granularity::kHead) clip_hi.assign(static_cast<std::size_t>(heads), 2.5f);
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
  std::vector<float> on(const FakeQuantBackend& backend, FakeQuantCounters* counters = nullptr) const {
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
