#include "libcalib/stats/kv_stats.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "libcalib/base/error.h"
#include "tests/stats/random_documents.h"

namespace calib::stats {
namespace {

using namespace test;

std::vector<const LayerStats::Split*> splits(const LayerStats& s) { return {&s.k_pre, &s.k_post, &s.v, &s.q_pre, &s.q_post}; }

void expect_same_tensor(const TensorStats& a, const TensorStats& b, double tolerance) {
  ASSERT_EQ(a.n_channels(), b.n_channels());
  for (std::size_t i = 0; i < a.n_channels(); ++i) {
    EXPECT_EQ(a.moments[i].n, b.moments[i].n);
    EXPECT_NEAR(a.moments[i].mean, b.moments[i].mean, tolerance * (1 + std::fabs(b.moments[i].mean)));
    EXPECT_NEAR(a.moments[i].m2, b.moments[i].m2, tolerance * b.moments[i].m2);
    EXPECT_NEAR(a.moments[i].m4, b.moments[i].m4, tolerance * b.moments[i].m4);
    EXPECT_EQ(a.extrema[i].min, b.extrema[i].min);
    EXPECT_EQ(a.extrema[i].max, b.extrema[i].max);
    EXPECT_TRUE(a.sketches[i] == b.sketches[i]);
  }
}
void expect_same_gram(const GramAccumulator& a, const GramAccumulator& b, double tolerance) {
  for (int m = 0; m < a.n_matrices(); ++m) {
    EXPECT_EQ(a.n_rows(m), b.n_rows(m));
    const auto x = a.matrix(m), y = b.matrix(m);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], tolerance * (1 + std::fabs(y[0])));
  }
}
void expect_same(const LayerStats& a, const LayerStats& b, double tolerance) {
  for (std::size_t i = 0; i < 5; ++i) {
    expect_same_tensor(splits(a)[i]->body, splits(b)[i]->body, tolerance);
    expect_same_tensor(splits(a)[i]->sink, splits(b)[i]->sink, tolerance);
  }
  expect_same_gram(a.query_moment, b.query_moment, tolerance);
  expect_same_gram(a.query_cov, b.query_cov, tolerance);
  expect_same_gram(a.key_cov, b.key_cov, tolerance);
  expect_same_gram(a.value_cov, b.value_cov, tolerance);
  EXPECT_EQ(a.pair_absmax, b.pair_absmax);
}

// CASES.md SA-02, with the rule of FORMATS.md 1: a massive token elsewhere is reported, not moved, so it stays in the body.
TEST(LayerStats, EveryDocumentsFirstTokensAreSinks) {
  std::vector<Document> documents;
  for (std::uint64_t i = 0; i < 5; ++i) {
    documents.push_back(make_document(64, i));
    for (std::vector<float>* x : {&documents.back().k_pre, &documents.back().k_post, &documents.back().v})
      for (int c = 0; c < kKv * kDim; ++c) (*x)[static_cast<std::size_t>(c)] *= 50;
  }
  const LayerStats s = stats_of(documents);
  for (const auto* split : splits(s)) {
    EXPECT_EQ(split->sink.n_tokens(), 5 * 4);
    EXPECT_EQ(split->body.n_tokens(), 5 * 60);
    EXPECT_LT(split->body.absmax(), 6);
  }
  EXPECT_GT(s.k_pre.sink.absmax(), 50);
  EXPECT_EQ(s.key_cov.n_rows(0), 300);
  EXPECT_EQ(s.query_moment.n_tokens(0), 300);
  for (const double variance : {s.key_cov.matrix(0)[0], s.value_cov.matrix(1)[0]}) EXPECT_NEAR(variance, 1, 0.4);
  EXPECT_LT(*std::max_element(s.pair_absmax.begin(), s.pair_absmax.end()), 8);

  const LayerStats plain = stats_of(documents, 0);
  for (std::size_t i = 0; i < 5; ++i) expect_same_tensor(splits(s)[i]->all(), splits(plain)[i]->body, 1e-11);
  EXPECT_EQ(plain.k_pre.sink.n_tokens(), 0);

  const std::size_t at = static_cast<std::size_t>(40 * kKv * kDim);
  documents[3].k_post[at] *= 1000;
  const LayerStats massive = stats_of(documents);
  EXPECT_EQ(massive.k_post.sink.n_tokens(), 20);
  EXPECT_EQ(massive.k_post.body.absmax(0, 0), std::max(std::fabs(documents[3].k_post[at]), s.k_post.body.absmax(0, 0)));
}

TEST(LayerStats, DocumentShorterThanItsSinks) {
  const LayerStats s = stats_of({make_document(3, 1), make_document(64, 2)});
  EXPECT_EQ(s.v.sink.n_tokens(), 3 + 4);
  EXPECT_EQ(s.v.body.n_tokens(), 60);
}

// CASES.md SA-06
TEST(LayerStats, RepeatedTokensDoNotBreakAnything) {
  Document constant = make_document(512, 1);
  for (std::vector<float>* x : {&constant.k_pre, &constant.k_post, &constant.v, &constant.q_pre, &constant.q_post}) std::fill(x->begin(), x->end(), 7.5f);
  const LayerStats s = stats_of({constant});
  EXPECT_EQ(s.k_pre.body.moments[0].variance(), 0);
  EXPECT_EQ(s.k_pre.body.moments[0].excess_kurtosis(), 0);
  EXPECT_EQ(s.k_pre.body.quantile(0, 0, 0.99), 7.5);
  for (const double value : s.key_cov.eigenvalues(0)) EXPECT_EQ(value, 0);

  const Document varied = make_document(512, 2);
  const LayerStats both = stats_of({constant, varied});
  const LayerStats alone = stats_of({varied});
  EXPECT_EQ(both.k_pre.body.absmax(0, 0), std::max(7.5f, alone.k_pre.body.absmax(0, 0)));
  EXPECT_EQ(both.k_pre.body.n_tokens(), 2 * 508);
}

// CASES.md SA-08
TEST(LayerStats, IndependentOfDocumentOrderAndThreads) {
  std::vector<Document> documents;
  for (std::uint64_t i = 0; i < 4; ++i) documents.push_back(make_document(40 + 150 * static_cast<std::int64_t>(i), i));
  const LayerStats once = stats_of(documents);
  std::reverse(documents.begin(), documents.end());
  expect_same(stats_of(documents), once, 1e-11);
  std::swap(documents[0], documents[2]);
  const LayerStats other = stats_of(documents);
  expect_same(other, once, 1e-11);

  const LayerStats threads = stats_of(documents, 4, 5);  // same order: equal bits whatever the number of threads
  expect_same(threads, other, 0);
  EXPECT_EQ(threads.query_cov.sum_state(), other.query_cov.sum_state());
}

TEST(LayerStats, AddingDoesNotTouchTheInput) {
  const Document d = make_document(300, 9), copy = d;
  stats_of({d});
  EXPECT_EQ(d.k_pre, copy.k_pre);
  EXPECT_EQ(d.q_post, copy.q_post);
}

TEST(LayerStats, MergeEqualsOnePass) {
  const std::vector<Document> documents = {make_document(300, 1), make_document(20, 2), make_document(700, 3)};
  const LayerStats once = stats_of(documents);
  LayerStats left = stats_of({documents[0]}), tail = stats_of({documents[1]});
  tail.merge(stats_of({documents[2]}));
  left.merge(tail);
  expect_same(left, once, 1e-11);
  LayerStats reversed = stats_of({documents[2]});
  reversed.merge(stats_of({documents[1]}));
  reversed.merge(stats_of({documents[0]}));
  expect_same(reversed, once, 1e-11);
  LayerStats neutral(geometry(), 4);
  neutral.merge(once);
  expect_same(neutral, once, 0);
}

// CASES.md SA-09 at this level: a document is exactly its n_tokens rows, whatever lies behind them in memory.
TEST(LayerStats, RowsPastTheDocumentAreNotRead) {
  Document padded = make_document(64, 4);
  Document exact = padded;
  exact.n = padded.n = 5;
  for (std::vector<float>* x : {&padded.k_pre, &padded.k_post, &padded.v}) std::fill(x->begin() + 5 * kKv * kDim, x->end(), std::numeric_limits<float>::quiet_NaN());
  for (std::vector<float>* x : {&exact.k_pre, &exact.k_post, &exact.v}) x->resize(5 * kKv * kDim);
  expect_same(stats_of({padded}), stats_of({exact}), 0);
}

TEST(LayerStats, QueryMomentIsTheSumOverTheGroup) {
  const Document d = make_document(50, 6);
  const LayerStats s = stats_of({d}, 0);
  for (int h = 0; h < kKv; ++h)
    for (const auto& [i, j] : {std::pair{0, 0}, std::pair{2, 9}}) {
      double expected = 0;
      for (int t = 0; t < 50; ++t)
        for (int g = 0; g < kQ / kKv; ++g) {
          const float* q = d.q_post.data() + (t * kQ + h * (kQ / kKv) + g) * kDim;
          expected += static_cast<double>(q[i]) * q[j];
        }
      EXPECT_NEAR(s.query_moment.matrix(h)[static_cast<std::size_t>(i * kDim + j)], expected / 50, 2e-5);
    }
}

TEST(LayerStats, EnvelopeFollowsTheRopePairs) {
  Document d = make_document(2, 7);
  std::fill(d.k_pre.begin(), d.k_pre.end(), 0.0f);
  d.k_pre[0] = 3;   // head 0, channel 0
  d.k_pre[8] = -4;  // channel 8: the half-split partner of 0
  d.k_pre[1] = 12;  // the interleaved partner of 0
  const auto envelope = [&](RopeStyle style, int rotary) {
    LayerGeometry g = geometry();
    g.rope_style = style;
    g.rotary_dim = rotary;
    ThreadPool pool(1);
    LayerStats s(g, 0);
    s.add_document(d.view(), pool);
    return s.pair_absmax;
  };
  EXPECT_EQ(envelope(RopeStyle::kHalfSplit, 16)[0], 5);
  EXPECT_EQ(envelope(RopeStyle::kHalfSplit, 16)[1], 12);
  EXPECT_NEAR(envelope(RopeStyle::kInterleaved, 16)[0], std::sqrt(153.0), 1e-5);
  EXPECT_EQ(envelope(RopeStyle::kInterleaved, 16)[4], 4);
  const std::vector<float> partial = envelope(RopeStyle::kHalfSplit, 4);  // pairs (0,2), (1,3), then neighbours from 4
  EXPECT_EQ(partial[0], 3);
  EXPECT_EQ(partial[1], 12);
  EXPECT_EQ(partial[4], 4);
  EXPECT_EQ(envelope(RopeStyle::kNone, 0)[0], 12);
}

TEST(LayerStats, NamesTheFirstNonFiniteValue) {
  Document d = make_document(64, 8);
  d.v[static_cast<std::size_t>((20 * kKv + 1) * kDim + 5)] = std::numeric_limits<float>::infinity();
  d.q_post[static_cast<std::size_t>((30 * kQ + 2) * kDim)] = std::numeric_limits<float>::quiet_NaN();
  try {
    stats_of({d}, 4, 3);
    FAIL() << "accepted infinity";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNumeric);
    EXPECT_EQ(e.where(), "v, head 1, channel 5, position 20");
    EXPECT_NE(e.message().find("infinity"), std::string::npos);
  }
}

TEST(LayerStats, AttentionOfSampledRows) {
  const std::int64_t n = 300;
  SampledRows rows;
  rows.rows = {100, 299};
  rows.row_weight = {2, 1};
  std::vector<float> p(static_cast<std::size_t>(kQ * 2 * n), 0.0f);
  for (int h = 0; h < kQ; ++h)
    for (int r = 0; r < 2; ++r)
      for (std::int64_t j = 0; j <= rows.rows[static_cast<std::size_t>(r)]; ++j)
        p[static_cast<std::size_t>((h * 2 + r) * n + j)] = 1.0f / static_cast<float>(rows.rows[static_cast<std::size_t>(r)] + 1);
  rows.p = p.data();
  ThreadPool pool(2);
  LayerStats s(geometry(), 4);
  s.add_attention(rows, n, pool);
  EXPECT_EQ(s.attention.n_buckets(), 2);
  for (int h = 0; h < kQ; ++h) {
    EXPECT_NEAR(s.attention.mean(h, 0, AttentionStats::kEntropy), std::log(101.0), 1e-5);
    EXPECT_NEAR(s.attention.mean(h, 1, AttentionStats::kSinkMass), 4.0 / 300, 1e-7);
    EXPECT_EQ(s.attention.weight(h, 0), 2);
  }
}

}  // namespace
}  // namespace calib::stats
