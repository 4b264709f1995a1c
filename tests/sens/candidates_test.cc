#include "libcalib/sens/candidates.h"

#include <cmath>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "libcalib/sens/fisher.h"
#include "libcalib/sens/metrics.h"
#include "tests/support/expect_error.h"

namespace calib::sens {
namespace {

ModelIdentity model_of(const std::vector<int>& head_dims) {
  ModelIdentity model;
  model.name = "m";
  for (std::size_t l = 0; l < head_dims.size(); ++l) {
    LayerGeometry g;
    g.index = static_cast<int>(l);
    g.n_q_heads = 4;
    g.n_kv_heads = 2;
    g.head_dim = g.rotary_dim = head_dims[l];
    model.layers.push_back(g);
  }
  return model;
}

TEST(Candidates, InvalidSchemesDropOutWithANote) {
  SensResult grid;
  grid.model = model_of({64, 96});
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  lay_out_grid({"custom", {"int4.token.g32", "int4.token.g64"}, {"int4.token.g", "int4.token.g128"}}, {}, &grid, log);
  EXPECT_EQ(grid.schemes, (std::vector<std::string>{"int4.token.g32", "int4.token.g64", "int4.token.g"}));
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_NE(notes[0].find("int4.token.g64"), std::string::npos);
  EXPECT_NE(notes[0].find("layers 1"), std::string::npos);
  EXPECT_NE(notes[1].find("int4.token.g128"), std::string::npos);
  // Units: layer-major, K before V. K of layer 1 cannot hold g64.
  EXPECT_EQ(grid.valid, (std::vector<std::uint8_t>{1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1}));
  for (std::size_t i = 0; i < grid.valid.size(); ++i) EXPECT_EQ(std::isfinite(grid.base_bytes_per_token[i]), grid.valid[i] == 1);
}

TEST(Candidates, KeysWithoutRopeHaveOneFrame) {
  SensResult grid;
  grid.model = model_of({64, 64});
  grid.model.layers[0].rotary_dim = 64;
  grid.model.layers[1].rope_style = RopeStyle::kNone, grid.model.layers[1].rotary_dim = 0, grid.model.layers[1].inv_freq.clear();
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  lay_out_grid({"custom", {"int4.channel.g64", "int4.channel.g64.pre", "int3.channel.g64.pre.ef"}, {"int4.token.g64"}}, {}, &grid, log);
  EXPECT_EQ(grid.schemes,
            (std::vector<std::string>{"int4.channel.g64", "int4.channel.g64.pre", "int3.channel.g64.pre.ef", "int3.channel.g64.ef", "int4.token.g64"}));
  EXPECT_EQ(grid.valid, (std::vector<std::uint8_t>{1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1}));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("layers 1 have no RoPE"), std::string::npos);
}

TEST(Candidates, NothingLeftIsAnError) {
  SensResult grid;
  grid.model = model_of({64});
  test::expect_error([&] { lay_out_grid({"custom", {"int4.token.g128"}, {}}, {}, &grid, {}); }, ErrorKind::kUsage, {"no candidate"});
}

TEST(Candidates, IsolatedTiersUseTheUnitsOwnGroup) {
  EXPECT_EQ(isolated_tiers(quant::parse_scheme("int4.channel.g64.pre"), 4, 128).exit_block(), 64);
  EXPECT_EQ(isolated_tiers(quant::parse_scheme("int4.token.g64"), 4, 128).exit_block(), 1);
}

double output_error(const std::vector<double>& q, const std::vector<float>& k, const std::vector<float>& v, const std::vector<float>& k_hat,
                    const std::vector<float>& v_hat, std::int64_t d) {
  const auto output = [&](const std::vector<float>& keys, const std::vector<float>& values) {
    const std::int64_t n = static_cast<std::int64_t>(keys.size()) / d;
    std::vector<double> s(static_cast<std::size_t>(n)), o(static_cast<std::size_t>(d), 0.0);
    double top = -1e300, sum = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      double x = 0;
      for (std::int64_t c = 0; c < d; ++c) x += q[static_cast<std::size_t>(c)] * keys[static_cast<std::size_t>(j * d + c)];
      s[static_cast<std::size_t>(j)] = x / std::sqrt(static_cast<double>(d));
      top = std::max(top, s[static_cast<std::size_t>(j)]);
    }
    for (double& x : s) sum += x = std::exp(x - top);
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t c = 0; c < d; ++c) o[static_cast<std::size_t>(c)] += s[static_cast<std::size_t>(j)] / sum * values[static_cast<std::size_t>(j * d + c)];
    return o;
  };
  const auto a = output(k, v), b = output(k_hat, v_hat);
  double e = 0;
  for (std::size_t c = 0; c < a.size(); ++c) e += (a[c] - b[c]) * (a[c] - b[c]);
  return e;
}

// SN-02: a giant first token ruins what shares its group; as a sink it touches nothing.
TEST(Candidates, SinksAreKeptOutOfGroups) {
  constexpr std::int64_t n = 128, d = 64;
  LayerGeometry g;
  g.n_q_heads = g.n_kv_heads = 1;
  g.head_dim = g.rotary_dim = d;
  Rng rng(5);
  std::vector<float> k(n * d), v(n * d);
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(rng.normal() * (i < d ? 50 : 1));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(rng.normal() * (i < d ? 50 : 1));
  ThreadPool pool(1);
  for (const bool channel : {false, true}) {
    const UnitCandidate c{0, quant::parse_scheme(channel ? "int4.channel.g32" : "int4.token.g"), {}};
    std::vector<float> error[2], value_error[2];
    double later[2] = {0, 0}, out[2] = {0, 0};
    for (const int s : {0, 1}) {
      const std::int64_t sinks = s == 0 ? 0 : 4;
      error[s].resize(k.size());
      value_error[s].resize(v.size());
      quantisation_error(c, Side::kK, g, sinks, false, n, k.data(), error[s].data(), pool);
      quantisation_error(c, Side::kV, g, sinks, false, n, v.data(), value_error[s].data(), pool);
      for (std::int64_t i = 4 * d; i < 32 * d; ++i) later[s] += error[s][static_cast<std::size_t>(i)] * error[s][static_cast<std::size_t>(i)];
      std::vector<float> k_hat = k, v_hat = v;
      for (std::size_t i = 0; i < k.size(); ++i) k_hat[i] += error[s][i], v_hat[i] += value_error[s][i];
      Rng queries(9);
      for (int r = 0; r < 200; ++r) {
        std::vector<double> q(d);
        for (double& x : q) x = queries.normal();
        out[s] += output_error(q, k, v, k_hat, v_hat, d);
      }
      for (std::int64_t i = 0; i < sinks * d; ++i) EXPECT_EQ(error[s][static_cast<std::size_t>(i)], 0);
    }
    if (channel) EXPECT_LT(std::sqrt(later[1]), std::sqrt(later[0]) / 4);
    else EXPECT_TRUE(std::equal(error[0].begin() + 4 * d, error[0].end(), error[1].begin() + 4 * d));
    EXPECT_LT(out[1], out[0] / 5) << channel;
  }
}

/// Mean attention KL of 300 normal queries with logits of deviation 2.
double attention_kl_of(const UnitCandidate& c, const LayerGeometry& g, const std::vector<float>& k) {
  const std::size_t d = static_cast<std::size_t>(g.head_dim), n = k.size() / d;
  std::vector<float> error(k.size());
  ThreadPool pool(1);
  quantisation_error(c, Side::kK, g, 0, false, static_cast<std::int64_t>(n), k.data(), error.data(), pool);
  Rng rng(31);
  double sum = 0;
  std::vector<double> q(d), p(n), delta(n);
  for (int r = 0; r < 300; ++r) {
    for (double& x : q) x = 2 * rng.normal() / std::sqrt(static_cast<double>(d));
    double top = -1e300, total = 0;
    for (std::size_t j = 0; j < n; ++j) {
      p[j] = delta[j] = 0;
      for (std::size_t i = 0; i < d; ++i) p[j] += q[i] * k[j * d + i], delta[j] += q[i] * error[j * d + i];
      top = std::max(top, p[j]);
    }
    for (double& x : p) total += x = std::exp(x - top);
    for (double& x : p) x /= total;
    sum += attention_kl(p, delta) / 300;
  }
  return sum;
}

// G35: the norm of a vector whose mean is 8 deviations says little about the part that attention reads.
TEST(Candidates, GoldenG35KeysOfALargeMeanNeedCentringBeforeANorm) {
  constexpr std::size_t n = 512, d = 128;
  LayerGeometry g;
  g.n_q_heads = g.n_kv_heads = 1;
  g.head_dim = g.rotary_dim = static_cast<int>(d);
  Rng rng(30);
  quant::SchemeParams params;
  for (std::size_t i = 0; i < d; ++i) params.mean.push_back(rng.uniform() < 0.5 ? -8.0f : 8.0f);
  std::vector<float> k(n * d);
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = params.mean[i % d] + static_cast<float>(rng.normal());
  const double plain = attention_kl_of({0, quant::parse_scheme("lm3.token.g.had"), {}}, g, k);
  const double centred = attention_kl_of({0, quant::parse_scheme("lm3.token.g.center.had"), params}, g, k);
  EXPECT_GT(plain / centred, 10) << plain << " " << centred;
  EXPECT_GT(centred, 0);
  // 4.7: a cosine sees none of it.
  std::vector<float> error(k.size());
  ThreadPool pool(1);
  quantisation_error({0, quant::parse_scheme("lm3.token.g.had"), {}}, Side::kK, g, 0, false, n, k.data(), error.data(), pool);
  double dot = 0, a = 0, b = 0;
  for (std::size_t i = 0; i < k.size(); ++i) {
    const double x = k[i], y = x + error[i];
    dot += x * y, a += x * x, b += y * y;
  }
  EXPECT_GT(dot / std::sqrt(a * b), 0.97);
}

TEST(Fisher, HandValues) {
  // Two draws, one head of 2 channels, one token: ((1*3 + 2*(-1))^2 + (0*3 + 1*(-1))^2) / (2*2) and squares one by one.
  const float g[] = {1, 2, 0, 1}, delta[] = {3, -1};
  const FisherShape shape{1, 2, 1, 2};
  FisherRows rows(shape);
  ThreadPool pool(1);
  add_fisher_rows(shape, g, delta, &rows, pool);
  EXPECT_DOUBLE_EQ(rows.vec[0], (1.0 + 1.0) / 4);
  EXPECT_DOUBLE_EQ(rows.diagonal[0], (9.0 + 4.0 + 0.0 + 1.0) / 4);
  EXPECT_EQ(rows.direction, (std::vector<double>{1.0, -1.0}));
}

TEST(Fisher, DirectionsAddUpOverTokensAndHeads) {
  // One draw, two tokens of two heads: what one vector loses another gives back.
  const float g[] = {1, 2, 3, 4}, delta[] = {4, -1, 2, -3};
  const FisherShape shape{2, 1, 2, 1};
  FisherRows rows(shape);
  ThreadPool pool(1);
  add_fisher_rows(shape, g, delta, &rows, pool);
  EXPECT_EQ(rows.direction, (std::vector<double>{4.0 - 2.0 + 6.0 - 12.0}));
  add_fisher_rows(shape, g, delta, &rows, pool);
  EXPECT_EQ(rows.direction, (std::vector<double>{-8.0}));
}

TEST(Fisher, LanesAndThreadsDoNotMatter) {
  constexpr std::int64_t n = 150, draws = 3, heads = 2, d = 37;
  Rng rng(2);
  std::vector<float> g(n * draws * heads * d), delta(n * heads * d);
  for (float& x : g) x = static_cast<float>(rng.normal());
  for (float& x : delta) x = static_cast<float>(rng.normal());
  const FisherShape shape{n, draws, heads, d};
  FisherRows rows(shape), rows2(shape);
  ThreadPool one(1), two(2);
  add_fisher_rows(shape, g.data(), delta.data(), &rows, one);
  add_fisher_rows(shape, g.data(), delta.data(), &rows2, two);
  const std::vector<double>&vec = rows.vec, &diagonal = rows.diagonal;
  EXPECT_EQ(vec, rows2.vec);
  EXPECT_EQ(diagonal, rows2.diagonal);
  EXPECT_EQ(rows.direction, rows2.direction);
  for (std::int64_t j = 0; j < n; j += 29) {
    double a = 0, b = 0;
    for (std::int64_t r = 0; r < draws; ++r)
      for (std::int64_t h = 0; h < heads; ++h) {
        double dot = 0;
        for (std::int64_t c = 0; c < d; ++c) {
          const double x = static_cast<double>(g[static_cast<std::size_t>(((j * draws + r) * heads + h) * d + c)]) *
                           delta[static_cast<std::size_t>((j * heads + h) * d + c)];
          dot += x;
          b += x * x;
        }
        a += dot * dot;
      }
    // fp32 products in lanes of 16: three rounded additions a lane.
    EXPECT_NEAR(vec[static_cast<std::size_t>(j)], a / (2 * draws), 1e-5 * (a + b));
    EXPECT_NEAR(diagonal[static_cast<std::size_t>(j)], b / (2 * draws), 1e-6 * b);
  }
}

}  // namespace
}  // namespace calib::sens
