#include "kernels/read/decode_cpu.h"

#include <cstdlib>
#include <memory>

#include "kernels/core/isa.h"
#include "tests/kernels/decode_fixture.h"
#include "tests/kernels/rope_storage.h"

namespace kvrt {
namespace {

using namespace testing;

constexpr int kLengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 129, 391};
constexpr int kQueries[] = {1, 3, 4, 8};
constexpr int kDims[] = {64, 80, 96, 128};
constexpr int kSlots = 512;

/// Every format and granularity that this build can store without more constants than a static scale.
std::vector<std::string> offered(int d) {
  std::vector<std::string> out;
  for (const char* format : {"bf16", "fp16", "fp8e4m3", "fp8e5m2", "int8", "int4", "int3", "int2", "sint8", "sint4", "q8_0", "q4_0", "q4_1", "q5_0",
                             "q5_1", "iq4_nl", "nuq4", "nuq3", "nuq2", "lm4", "lm3", "lm2", "nvfp4", "mxfp4"}) {
    for (const char* granularity : {"", ".tensor", ".head", ".token.g", ".token.g32", ".token.g16", ".token.g40", ".channel.g32", ".channel.g64",
                                    ".channel.g128", ".channel.static"}) {
      Scheme s;
      std::string error;
      const std::string text = std::string(format) + granularity;
      if (!parse_scheme(text, &s, &error) || !check_implemented(s).empty() || !check_shape(s, d, true).empty()) continue;
      out.push_back(text);
    }
  }
  return out;
}

std::vector<float> queries(int n, int d, std::uint64_t seed) {
  calib::Rng rng(seed);
  std::vector<float> q(static_cast<std::size_t>(n * d));
  for (float& x : q) x = static_cast<float>(0.2 * rng.normal());
  return q;
}

HeadAttention job_of(const Pool& k, const Pool& v, int n_tokens, const std::vector<float>& q, PartialBuffer* out) {
  HeadAttention job;
  job.segment = {k.side(), v.side(), k.pages.data(), n_tokens, 0, k.n_slots, 0, false};
  job.q = q.data(), job.n_queries = static_cast<int>(out->m.size()), job.out = out->view();
  return job;
}

/// 4u (A_v + A_s) of KERNELS.md 7 with the u of fp32 arithmetic, 2^-20, where that page allows 2^-11 or 2^-8; and 2^-22 for exp2.
void expect_close(const Expected& e, const float* o, float lse, const std::string& what) {
  double a_v = 0;
  for (const double a : e.a_v) a_v = std::max(a_v, a);
  for (std::size_t c = 0; c < e.o.size(); ++c) {
    ASSERT_NEAR(o[c], e.o[c], 4 * 0x1p-20 * (e.a_v[c] + e.a_s[c]) + 0x1p-22 * a_v) << what << " channel " << c;
  }
  ASSERT_NEAR(lse, e.lse, 1e-5 * (1 + std::fabs(e.lse))) << what;
}
std::vector<Expected> expected_of(const DenseRows& rows, int n, const std::vector<float>& q, int n_queries) {
  std::vector<Expected> e;
  for (int g = 0; g < n_queries; ++g) e.push_back(attend_double(rows, static_cast<std::size_t>(n), &q[static_cast<std::size_t>(g) * rows.k[0].size()]));
  return e;
}
/// The first n_queries of `expected` against the partial.
void expect_attention(const std::vector<Expected>& expected, int n_queries, PartialBuffer* out, const std::string& what) {
  const int d = static_cast<int>(expected[0].o.size()), held = static_cast<int>(out->m.size());
  std::vector<float> o(static_cast<std::size_t>(held * d), NAN), lse(static_cast<std::size_t>(held), NAN);
  const Partial part = out->view();
  combine_partials(&part, 1, held, d, o.data(), lse.data());
  for (int g = 0; g < n_queries; ++g) {
    const auto at = static_cast<std::size_t>(g);
    expect_close(expected[at], &o[at * static_cast<std::size_t>(d)], lse[at], what + " query " + std::to_string(g));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Each format as K and as V over all widths, lengths and query counts, on every path. Beyond the live tokens everything is 0xFF: codes,
// parameters (NaN as fp16) and the neighbours' blocks.
TEST(DecodeCpu, EveryFormatEqualsAttentionInDouble) {
  for (const int d : kDims) {
    const std::vector<float> q = queries(8, d, 7);
    const std::vector<std::string> schemes = offered(d);
    for (std::size_t i = 0; i < schemes.size(); ++i) {
      const std::string &k_scheme = schemes[i], &v_scheme = schemes[(i + 1) % schemes.size()];
      const int page = std::max({64, parse(k_scheme).granularity == Granularity::kChannel ? parse(k_scheme).group : 0,
                                 parse(v_scheme).granularity == Granularity::kChannel ? parse(v_scheme).group : 0});
      Pool k(k_scheme, d, page, kSlots, 1), v(v_scheme, d, page, kSlots, 2);
      DenseRows rows;
      int written = 0;
      for (const int n : kLengths) {
        k.write(written, n), v.write(written, n);
        for (; written < n; ++written) rows.add(k, v, written, nullptr, 0, {}, {});
        const std::vector<Expected> expected = expected_of(rows, n, q, 8);
        for (const int n_queries : kQueries) {
          for (const DecodeBackend& path : decode_backends()) {
            PartialBuffer out(n_queries, d);
            run_path(path, job_of(k, v, n, q, &out));
            expect_attention(expected, n_queries, &out, k_scheme + " " + v_scheme + " D " + std::to_string(d) + " T " + std::to_string(n) + " " + path.name);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(DecodeCpu, AnyKeyFormatGoesWithAnyValueFormat) {
  const int d = 96, n = 70;
  const std::vector<float> q = queries(4, d, 8);
  const std::vector<std::string> schemes = offered(d);
  std::vector<std::unique_ptr<Pool>> keys, values;
  for (const std::string& s : schemes) {
    keys.push_back(std::make_unique<Pool>(s, d, 128, 128, 3));
    values.push_back(std::make_unique<Pool>(s, d, 128, 128, 4));
    keys.back()->write(0, n), values.back()->write(0, n);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < values.size(); ++j) {
      DenseRows rows;
      for (int t = 0; t < n; ++t) rows.add(*keys[i], *values[j], t, nullptr, 0, {}, {});
      const std::vector<Expected> expected = expected_of(rows, n, q, 1);
      for (const DecodeBackend& path : decode_backends()) {
        PartialBuffer out(4, d);
        run_path(path, job_of(*keys[i], *values[j], n, q, &out));
        expect_attention(expected, 1, &out, schemes[i] + " " + schemes[j] + " " + path.name);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Widths that are no multiple of 16 take the scalar unpacker.
TEST(DecodeCpu, OddWidths) {
  for (const int d : {8, 72, 100, 192, 256}) {
    for (const char* scheme : {"bf16", "int4.token.g", "int3.token.g", "int8.channel.g32"}) {
      Pool k(scheme, d, 64, 128, 5), v(scheme, d, 64, 128, 6);
      k.write(0, 77), v.write(0, 77);
      DenseRows rows;
      for (int t = 0; t < 77; ++t) rows.add(k, v, t, nullptr, 0, {}, {});
      const std::vector<float> q = queries(13, d, 9);
      const std::vector<Expected> expected = expected_of(rows, 77, q, 13);
      for (const DecodeBackend& path : decode_backends()) {
        PartialBuffer out(13, d);
        run_path(path, job_of(k, v, 77, q, &out));
        expect_attention(expected, 13, &out, std::string(scheme) + " D " + std::to_string(d) + " " + path.name);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A ring of exact pages that has wrapped: live tokens start inside a page and end before it; and means of both sides.
TEST(DecodeCpu, RingOfExactPagesAndMeans) {
  const int d = 64;
  const std::vector<float> q = queries(4, d, 10), mean_k = queries(1, d, 11), mean_v = queries(1, d, 12);
  Pool k("bf16", d, 16, 48, 5), v("bf16", d, 16, 48, 6);
  for (const int first : {0, 5, 16, 37, 47}) {
    for (const int n : {1, 10, 33, 48}) {
      std::fill(k.bytes.begin(), k.bytes.end(), std::uint8_t{0xFF});
      std::fill(v.bytes.begin(), v.bytes.end(), std::uint8_t{0xFF});
      DenseRows rows;
      for (int i = 0; i < n; ++i) {
        const int slot = (first + i) % 48;
        k.write(slot, slot + 1), v.write(slot, slot + 1);
        rows.add(k, v, slot, nullptr, 0, mean_k, mean_v);
      }
      const std::vector<Expected> expected = expected_of(rows, n, q, 4);
      for (const DecodeBackend& path : decode_backends()) {
        PartialBuffer out(4, d);
        HeadAttention job = job_of(k, v, n, q, &out);
        job.segment.first_slot = first, job.k_mean = mean_k.data(), job.v_mean = mean_v.data();
        run_path(path, job);
        expect_attention(expected, 4, &out, "first " + std::to_string(first) + " n " + std::to_string(n) + " " + path.name);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Keys before RoPE: half-split and interleaved pairs, full and partial width, positions to 2^20, base pages and a wrapped ring.
TEST(DecodeCpu, KeysBeforeRopeAreRotatedByTheirPosition) {
  const int d = 96, n = 150;
  const std::vector<float> q = queries(4, d, 13), mean = queries(1, d, 14);
  for (const char* scheme : {"int4.channel.g64", "int8.token.g", "int3.channel.g32", "bf16", "q4_0", "int2.channel.g128", "int4.token.g32"}) {
    for (const bool is_ring : {false, true}) {
      if (is_ring && parse(scheme).format != Format::kBf16) continue;
      const int page = is_ring ? 16 : 128, first_slot = is_ring ? 37 : 0;
      Pool k(scheme, d, page, is_ring ? 160 : 256, 15), v(is_ring ? "bf16" : "int4.token.g", d, page, is_ring ? 160 : 256, 16);
      for (int i = 0; i < n; ++i) {
        const int slot = (first_slot + i) % k.n_slots;
        if (k.codec.granularity != Granularity::kChannel) k.write(slot, slot + 1);
        v.write(slot, slot + 1);
      }
      if (k.codec.granularity == Granularity::kChannel) k.write(0, n);
      for (const int width : {96, 48}) {
        for (const bool interleaved : {false, true}) {
          Rope rope;
          rope.interleaved = interleaved;
          for (int i = 0; i < width / 2; ++i) rope.inv_freq.push_back(std::pow(10000.0, -2.0 * i / width));
          const test::RopeStorage turned(rope.inv_freq, interleaved, (1 << 20) + 1);
          for (const int position : {0, 4, 1000, (1 << 20) - n + 1}) {
            DenseRows rows;
            for (int i = 0; i < n; ++i) rows.add(k, v, (first_slot + i) % k.n_slots, &rope, position + i, mean, {});
            const std::vector<Expected> expected = expected_of(rows, n, q, 2);
            for (const DecodeBackend& path : decode_backends()) {
              PartialBuffer out(4, d);
              HeadAttention job = job_of(k, v, n, q, &out);
              job.segment.first_slot = first_slot, job.segment.first_position = position, job.segment.pre = true;
              job.rope = &turned.tables, job.rope_tile = turned.tile.data(), job.k_mean = mean.data();
              run_path(path, job);
              expect_attention(expected, 2, &out,
                               std::string(scheme) + " width " + std::to_string(width) + " position " + std::to_string(position) + " " + path.name);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// 1 to 64 splits of one sequence, of which most may be empty and hold poison, give one softmax over all tokens.
TEST(DecodeCpu, CombinedSplitsEqualOneCall) {
  const int d = 64, n = 129;
  Pool k("int8.token.g", d, 64, 192, 17, 3.0), v("int4.token.g", d, 64, 192, 18);
  k.write(0, n), v.write(0, n);
  const std::vector<float> q = queries(3, d, 19);
  DenseRows rows;
  for (int t = 0; t < n; ++t) rows.add(k, v, t, nullptr, 0, {}, {});
  const DecodeBackend path = decode_backends().back();
  std::vector<PartialBuffer> parts(64, PartialBuffer(3, d));
  for (int split = 0; split < 64; ++split) {
    std::fill(parts[static_cast<std::size_t>(split)].o.begin(), parts[static_cast<std::size_t>(split)].o.end(), NAN);
    if (split % 23 != 1) continue;  // splits 1, 24, 47: one page each
    PartialBuffer& part = parts[static_cast<std::size_t>(split)];
    clear_partial(part.view(), 3, d);
    const int page = split / 23;
    HeadAttention job = job_of(k, v, std::min(64, n - 64 * page), q, &part);
    job.segment.pages += page, job.segment.n_slots = 64;
    run_path(path, job);
  }
  std::vector<Partial> views;
  for (PartialBuffer& p : parts) views.push_back(p.view());
  std::vector<float> o(3 * d, NAN), lse(3, NAN);
  combine_partials(views.data(), 64, 3, d, o.data(), lse.data());
  for (int g = 0; g < 3; ++g) {
    expect_close(attend_double(rows, n, &q[static_cast<std::size_t>(g * d)]), &o[static_cast<std::size_t>(g * d)], lse[static_cast<std::size_t>(g)], "splits");
  }
  PartialBuffer none(3, d);
  const Partial empty = none.view();
  combine_partials(&empty, 1, 3, d, o.data(), lse.data());
  EXPECT_EQ(std::vector<float>(3 * d, 0.0f), o);
  EXPECT_EQ(lse[0], -INFINITY);
}

// Segments of different formats added to one partial are one softmax.
TEST(DecodeCpu, SegmentsAddToOnePartial) {
  const int d = 128;
  Pool sink("bf16", d, 16, 16, 20, 4.0), base_k("int4.channel.g64", d, 64, 128, 21), base_v("int2.token.g32", d, 64, 128, 22);
  sink.write(0, 4), base_k.write(0, 128), base_v.write(0, 128);
  const std::vector<float> q = queries(8, d, 23);
  DenseRows rows;
  for (int t = 0; t < 128; ++t) rows.add(base_k, base_v, t, nullptr, 0, {}, {});
  for (int t = 0; t < 4; ++t) rows.add(sink, sink, t, nullptr, 0, {}, {});
  const std::vector<Expected> expected = expected_of(rows, 132, q, 8);
  for (const DecodeBackend& path : decode_backends()) {
    PartialBuffer out(8, d);
    run_path(path, job_of(base_k, base_v, 128, q, &out));
    run_path(path, job_of(sink, sink, 4, q, &out));
    run_path(path, job_of(sink, sink, 0, q, &out));
    expect_attention(expected, 8, &out, path.name);
  }
}

TEST(DecodeCpu, ScoresAreCapped) {
  const int d = 64, n = 50;
  Pool k("int8.token.g", d, 64, 64, 27, 3.0), v("int8.token.g", d, 64, 64, 28);
  k.write(0, n), v.write(0, n);
  const std::vector<float> q = queries(4, d, 29), mean = queries(1, d, 30);
  DenseRows rows;
  for (int t = 0; t < n; ++t) rows.add(k, v, t, nullptr, 0, mean, {});
  for (const DecodeBackend& path : decode_backends()) {
    PartialBuffer out(4, d);
    HeadAttention job = job_of(k, v, n, q, &out);
    job.soft_cap = 2.0f, job.k_mean = mean.data();
    run_path(path, job);
    std::vector<float> o(static_cast<std::size_t>(4 * d), NAN), lse(4, NAN);
    combine_partials(&job.out, 1, 4, d, o.data(), lse.data());
    for (std::size_t g = 0; g < 4; ++g) {
      expect_close(attend_double(rows, n, &q[g * static_cast<std::size_t>(d)], 2.0), &o[g * static_cast<std::size_t>(d)], lse[g], path.name);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(DecodeCpu, AForcedPathIsTakenOrRefused) {
  DecodeBackend path{};
  for (const DecodeBackend& b : decode_backends()) {
    ASSERT_EQ(setenv("KVRT_FORCE_ISA", b.name, 1), 0);
    ASSERT_TRUE(choose_decode_backend(&path).ok());
    EXPECT_EQ(path.attend, b.attend);
  }
  setenv("KVRT_FORCE_ISA", "avx1024", 1);
  const Status refused = choose_decode_backend(&path);
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_NE(refused.text().find("avx1024"), std::string::npos);
  EXPECT_NE(refused.text().find(kBaselineName), std::string::npos);
  unsetenv("KVRT_FORCE_ISA");
  ASSERT_TRUE(choose_decode_backend(&path).ok());
  EXPECT_EQ(path.attend, decode_backends().back().attend);
}

TEST(DecodeCpu, BadCallsAreRefusedByName) {
  const int d = 64;
  Pool k("bf16", d, 64, 64, 24), v("bf16", d, 64, 64, 25);
  const std::vector<float> q = queries(1, d, 26);
  PartialBuffer out(1, d);
  const test::RopeStorage wide(std::vector<double>(33, 0.1), false, 100), fitting(std::vector<double>(32, 0.1), false, 100);
  struct Case {
    const char* expected;
    void (*change)(HeadAttention*);
  };
  const Case cases[] = {
      {"n_queries is 0", [](HeadAttention* j) { j->n_queries = 0; }},
      {"q or a part of out", [](HeadAttention* j) { j->q = nullptr; }},
      {"head_dim of K is 32", [](HeadAttention* j) { j->segment.k.codec.head_dim = 32; }},
      {"multiple of 16", [](HeadAttention* j) { j->segment.k.codec.page_tokens = j->segment.v.codec.page_tokens = 24; }},
      {"do not fit", [](HeadAttention* j) { j->segment.n_tokens = 65; }},
      {"page list", [](HeadAttention* j) { j->segment.pages = nullptr; }},
      {"rotary tables", [](HeadAttention* j) { j->segment.pre = true, j->rope = nullptr; }},
      {"turn 66 channels", [](HeadAttention* j) { j->segment.pre = true; }},
  };
  for (const Case& c : cases) {
    HeadAttention job = job_of(k, v, 64, q, &out);
    job.rope = &wide.tables, job.rope_tile = wide.tile.data();
    c.change(&job);
    const Status status = check_head_attention(job);
    EXPECT_EQ(status.code(), Code::kArgument);
    EXPECT_NE(status.text().find(c.expected), std::string::npos) << status.text();
  }
  HeadAttention job = job_of(k, v, 64, q, &out);
  job.rope = &fitting.tables, job.rope_tile = fitting.tile.data(), job.segment.pre = true;
  EXPECT_TRUE(check_head_attention(job).ok());
  job.segment.first_position = -1;
  EXPECT_NE(check_head_attention(job).text().find("first_position is -1"), std::string::npos);
}

}  // namespace
}  // namespace kvrt
