// G31: with a quantiser that changes nothing, `center`, `smooth` and `had` change no score and no output. Stored values sit on the static
// grid of their scheme, so that coding them is the identity; exact tokens are numbers that BF16 holds.

#include "kernels/codec/hadamard.h"
#include "kernels/codec/static_range.h"
#include "tests/kernels/cache_fixture.h"

namespace kvrt::testing {
namespace {

/// Rows [T, H, D] whose transforms land on the grid from token `first_coded` up to `end_coded`.
std::vector<float> rows_on_the_grid(const CacheShape& shape, const std::string& text, std::int64_t n, std::int64_t first_coded, std::int64_t end_coded,
                                    std::uint64_t seed) {
  Scheme scheme;
  std::string error;
  EXPECT_TRUE(parse_scheme(text, &scheme, &error)) << error;
  const UnitConstants constants(text, shape.heads, shape.width, shape.width);
  calib::Rng rng(seed);
  std::vector<float> x, y(static_cast<std::size_t>(shape.width));
  for (std::int64_t t = 0; t < n; ++t) {
    for (int h = 0; h < shape.heads; ++h) {
      const std::size_t row = static_cast<std::size_t>(h * shape.width);
      for (float& v : y) {
        const auto code = static_cast<float>(rng.below(16));
        const StaticRange range = static_range(scheme.format, constants.clip_lo[0], constants.clip_hi[0]);
        v = std::fma(code, range.scale, range.lo);
      }
      if (t < first_coded || t >= end_coded) {
        for (float& v : y) v = static_cast<float>(std::round(8 * v)) / 8;
        x.insert(x.end(), y.begin(), y.end());
        continue;
      }
      if (scheme.had) hadamard_rotate(hadamard_order(shape.width), y.data(), shape.width, true);
      for (std::size_t c = 0; c < y.size(); ++c) {
        x.push_back(y[c] * (scheme.smooth ? constants.smooth[row + c] : 1.0f) + (scheme.center ? constants.mean[row + c] : 0.0f));
      }
    }
  }
  return x;
}

const char* const kKeys[] = {"int4.tensor.had", "int4.tensor.smooth", "int4.tensor.center", "int4.tensor.center.had", "int4.tensor.smooth.had",
                             "int4.tensor.center.smooth.had", "int4.tensor.pre.center", "int4.tensor.pre.smooth"};

double tolerance_of(const std::string& scheme) { return scheme.find("had") != std::string::npos ? 1e-5 : 1e-6; }

class GoldenG31 : public ::testing::TestWithParam<kvrt_backend> {};

TEST_P(GoldenG31, OneScoreOfEverySchemeIsThatOfThePlainKey) {
  for (const char* k : kKeys) {
    CacheShape shape;
    shape.k = k, shape.v = "bf16", shape.sinks = 0, shape.window = 0, shape.n_seqs = 40, shape.max_length = 64, shape.backend = GetParam();
    const bool pre = shape.k.find(".pre") != std::string::npos;
    Cache cache(shape);
    ASSERT_TRUE(cache.status().ok()) << k << ": " << cache.status().text();
    const std::vector<float> keys = rows_on_the_grid(shape, shape.k, shape.n_seqs, 0, shape.n_seqs, 41), q = normal_rows(42, cache.q_row(), 2);
    ASSERT_TRUE(cache.append(std::vector<std::int64_t>(40, 1), keys.data(), keys.data(), pre ? KVRT_PRE_ROPE : KVRT_POST_ROPE).ok()) << k;
    const std::size_t width = static_cast<std::size_t>(shape.width);
    for (int s = 0; s < shape.n_seqs; ++s) {  // one token a sequence: its log-sum-exp is its score; position 0 turns nothing
      std::vector<float> out(q.size()), lse(static_cast<std::size_t>(shape.heads * shape.group));
      kvrt_attn attn = cache.attn(q.data(), out.data());
      attn.lse = lse.data();
      ASSERT_TRUE(cache.decode(attn, s).ok()) << k;
      for (std::size_t h = 0; h < lse.size(); ++h) {
        const float* key = &keys[(static_cast<std::size_t>(s * shape.heads) + h / static_cast<std::size_t>(shape.group)) * width];
        double score = 0, size = 0;
        for (std::size_t c = 0; c < width; ++c) {
          const double product = static_cast<double>(q[h * width + c]) * key[c] / 8;
          score += product, size += std::fabs(product);
        }
        ASSERT_NEAR(lse[h], score, tolerance_of(k) * size) << k << " sequence " << s;
      }
    }
  }
}

TEST_P(GoldenG31, AttentionOverExactAndTransformedTokensIsThatOverPlainOnes) {
  for (const char* k : kKeys) {
    for (const char* v : {"int4.tensor.center", "int4.tensor.had", "int4.tensor.center.had"}) {
      for (const double soft_cap : {0.0, 5.0}) {
        for (const bool learned : {false, true}) {
          CacheShape shape;
          shape.k = k, shape.v = v, shape.sinks = 4, shape.window = 32, shape.backend = GetParam();
          const bool pre = shape.k.find(".pre") != std::string::npos;
          const std::int64_t n = 150;
          Cache cache(shape);
          ASSERT_TRUE(cache.status().ok()) << k << ": " << cache.status().text();
          const std::vector<float> keys = rows_on_the_grid(shape, shape.k, n, 4, n - 32, 43), values = rows_on_the_grid(shape, shape.v, n, 4, n - 32, 44),
                                   q = normal_rows(45, cache.q_row(), 2);
          ASSERT_TRUE(cache.append({n}, keys.data(), values.data(), pre ? KVRT_PRE_ROPE : KVRT_POST_ROPE).ok()) << k;
          std::vector<float> out(q.size(), NAN), lse(static_cast<std::size_t>(shape.heads * shape.group), NAN), logits(lse.size(), 1.5f);
          kvrt_attn attn = cache.attn(q.data(), out.data());
          attn.lse = lse.data(), attn.soft_cap = soft_cap, attn.sink_logit = learned ? logits.data() : nullptr;
          ASSERT_TRUE(cache.decode(attn).ok()) << k;

          std::vector<double> rotated(keys.begin(), keys.end()), query(q.begin(), q.end());
          for (std::int64_t i = 0; pre && i < n * shape.heads; ++i)
            rotate_row(shape, cache.inv_freq(), i / shape.heads, &rotated[static_cast<std::size_t>(i * shape.width)]);
          for (int h = 0; h < shape.heads * shape.group; ++h) rotate_row(shape, cache.inv_freq(), n - 1, &query[static_cast<std::size_t>(h * shape.width)]);
          const Dense plain = dense_attention(query, rotated, values, n, shape.heads, shape.group, shape.width, 0.125, soft_cap, attn.sink_logit);
          // Scores reach 30: their fp32 rounding is 2e-6, which the softmax passes on as a relative error of its terms.
          const double tolerance = 10 * tolerance_of(std::string(k) + v);
          for (std::size_t h = 0; h < lse.size(); ++h) ASSERT_NEAR(lse[h], plain.lse[h], tolerance) << k << " " << v << " cap " << soft_cap;
          for (std::size_t i = 0; i < out.size(); ++i)
            ASSERT_NEAR(out[i], plain.out[i], tolerance * (1 + std::fabs(plain.out[i]))) << k << " " << v << " cap " << soft_cap;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, GoldenG31, ::testing::Values(KVRT_BACKEND_REF, KVRT_BACKEND_CPU));

}  // namespace
}  // namespace kvrt::testing
