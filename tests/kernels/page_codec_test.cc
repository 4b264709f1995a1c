#include "kernels/codec/page_codec.h"

#include <algorithm>
#include <vector>

#include "kernels/core/layout.h"
#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::Call;
using testing::parse;

struct Page {
  PageCodec codec;
  BlockLayout layout;
  std::vector<StaticRange> ranges;
  std::vector<std::uint8_t> block;  ///< one head block, 0xFF where nothing was written
};
Page make_page(const std::string& text, int d) {
  LayerLayout l;
  l.n_kv_heads = 1, l.head_dim = d;
  l.k = l.v = parse(text);
  l.tiers = finish_tiers(l.k, l.v, 0, 128, 0);
  Page p;
  p.layout = block_layout(l, CacheSide::kV);
  p.codec = make_page_codec(l.k, code_bits(l.k.format), d, p.layout.page_tokens);
  if (is_nuq(l.k.format)) {
    const float entries[] = {-1, -64 / 127.0f, -32 / 127.0f, 0, 8 / 127.0f, 16 / 127.0f, 64 / 127.0f, 1};
    p.codec.codebook = codebook_of_entries(entries, p.codec.bits == 2 ? 4 : 8);
  }
  p.ranges.assign(static_cast<std::size_t>(d), static_range(l.k.format, -4.0f, 4.0f));
  p.codec.range = p.ranges[0];
  p.codec.channel_ranges = p.ranges.data();
  if (l.k.clip) p.codec.clip_alpha = 0.8f;
  p.block.assign(static_cast<std::size_t>(p.layout.block), 0xFF);
  return p;
}
void write_page(Page* p, const std::vector<float>& rows, EncodeCounters* counters) {
  const int d = p->codec.head_dim, n = p->codec.page_tokens;
  if (p->codec.granularity == Granularity::kChannel) {
    for (int g = 0; g < n / p->codec.group; ++g)
      encode_channel_group(p->codec, &rows[static_cast<std::size_t>(g * p->codec.group * d)], d, g, p->block.data(), counters);
  } else {
    for (int t = 0; t < n; ++t) encode_row(p->codec, &rows[static_cast<std::size_t>(t * d)], t, p->block.data(), counters);
  }
}
std::vector<float> read_page(const Page& p) {
  std::vector<float> out(static_cast<std::size_t>(p.codec.page_tokens * p.codec.head_dim));
  for (int t = 0; t < p.codec.page_tokens; ++t) decode_row(p.codec, p.block.data(), t, &out[static_cast<std::size_t>(t * p.codec.head_dim)]);
  return out;
}

const char* const kSchemes[] = {"bf16",
                                "fp16",
                                "int8.token.g",
                                "int4.token.g",
                                "int4.token.g32",
                                "int3.token.g",
                                "int3.token.g32",
                                "int2.token.g32",
                                "int8.channel.g64",
                                "int4.channel.g32",
                                "int3.channel.g32",
                                "int3.channel.g128",
                                "int2.channel.g64",
                                "fp8e4m3.tensor",
                                "fp8e4m3.token.g",
                                "fp8e4m3.token.g32",
                                "fp8e5m2.token.g",
                                "sint8.token.g32",
                                "sint4.token.g",
                                "q8_0",
                                "q4_0",
                                "q4_1",
                                "q5_0",
                                "q5_1",
                                "lm4.token.g",
                                "lm3.token.g",
                                "lm2.token.g",
                                "lm3.token.g32",
                                "int8.channel.static",
                                "int4.tensor",
                                "int3.head",
                                "int2.channel.static",
                                "int3.channel.static",
                                "sint8.tensor",
                                "sint4.head",
                                "fp8e5m2.head",
                                "iq4_nl",
                                "nvfp4",
                                "mxfp4",
                                "nuq4.token.g",
                                "nuq3.token.g",
                                "nuq2.channel.static",
                                "nuq3.channel.static",
                                "int4.channel.g32.ef",
                                "lm3.token.g.ef",
                                "int3.token.g32.ef",
                                "nuq4.token.g.ef",
                                "int4.token.g.clip",
                                "int2.channel.g32.clip",
                                "int4.token.g.out1",
                                "int3.token.g32.out2",
                                "int4.channel.g64.out1",
                                "int3.channel.g32.out2.ef",
                                "int2.channel.g128.out0.5",
                                "nuq3.channel.static.out1",
                                "int4.channel.static.out2",
                                "nuq4.token.g.out1.ef",
                                "int8.tensor.out0.5"};

// PL-03: the byte formula against really packed buffers, for even and padded widths: parts start where the formula says, every byte of
// them is written, and nothing behind.
TEST(PageCodec, PackedBuffersHaveTheSizesOfTheByteFormula) {
  for (const char* text : kSchemes) {
    for (const int d : {64, 72, 80, 96, 100, 128, 192, 256}) {
      if (!check_shape(parse(text), d, false).empty()) continue;
      Page p = make_page(text, d);
      ASSERT_EQ(p.codec.params, p.layout.codes) << text;
      EncodeCounters counters;
      // Twice over different garbage: a byte that keeps either filling was never written.
      std::vector<float> rows(static_cast<std::size_t>(p.codec.page_tokens * d));
      calib::Rng rng(5);
      for (float& v : rows) v = static_cast<float>(rng.normal());
      write_page(&p, rows, &counters);
      const std::vector<std::uint8_t> first = p.block;
      std::fill(p.block.begin(), p.block.end(), std::uint8_t{0});
      write_page(&p, rows, &counters);
      const std::int64_t end = p.layout.codes + p.layout.params;
      std::size_t used = static_cast<std::size_t>(end + p.layout.outliers);
      if (p.codec.out_per_mille > 0) {
        ASSERT_EQ(p.codec.outliers, end) << text;
        // channel.g<N>: starts of slots that a page does not have, and the entries that round its quota up to four, are padding.
        if (p.codec.granularity == Granularity::kChannel)
          used = static_cast<std::size_t>(end + kOutlierStarts + 4 * ((p.codec.out_per_mille * p.codec.page_tokens * d + 999) / 1000));
      }
      for (std::size_t i = 0; i < p.block.size(); ++i) {
        const std::size_t starts_end = static_cast<std::size_t>(end) + 2 * static_cast<std::size_t>(p.codec.page_tokens / 16);
        const bool padding = p.codec.granularity == Granularity::kChannel && i >= starts_end && i < static_cast<std::size_t>(end) + kOutlierStarts;
        if (padding && p.codec.out_per_mille > 0) ASSERT_TRUE(first[i] == 0xFF && p.block[i] == 0) << text;
        else if (i < used) ASSERT_EQ(first[i], p.block[i]) << text << " D " << d << " byte " << i << " was not written";
        else ASSERT_TRUE(first[i] == 0xFF && p.block[i] == 0) << text << " D " << d << " byte " << i << " lies behind the block's parts";
      }
    }
  }
}

// L2: fake_quant equals write page + read page.
TEST(PageCodec, FakeQuantIsWriteThenRead) {
  for (const char* text : kSchemes) {
    for (const int d : {64, 80, 96, 128, 192, 256}) {
      if (!check_shape(parse(text), d, false).empty()) continue;
      Page p = make_page(text, d);
      Call call(text, p.codec.page_tokens, 1, d);
      call.fill_normal(static_cast<std::uint64_t>(d), 1.5, 0.5);
      const std::vector<StaticRange> ranges = call.ranges();
      if (!call.codebook.empty()) p.codec.codebook = codebook_of_entries(call.codebook.data(), static_cast<int>(call.codebook.size()));
      if (call.scheme.ef) p.codec.ef_u = call.ef_u.data(), p.codec.ef_order = call.ef_order.data();
      if (!ranges.empty()) p.codec.range = ranges[0], p.codec.channel_ranges = ranges.data();
      EncodeCounters written, scored;
      write_page(&p, call.x, &written);
      const std::vector<float> out = call.run(&scored), read = read_page(p);
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(f32_bits(out[i]), f32_bits(read[i])) << text << " D " << d;
      EXPECT_EQ(written.saturated, scored.saturated);
    }
  }
}

// A second pass over decoded values that kept the group's extremes finds the same codes.
TEST(PageCodec, DecodedIntegerPagesEncodeToTheSameCodes) {
  for (const char* text : {"int8.token.g", "int4.token.g32", "int3.token.g32", "int2.token.g32", "int4.channel.g32", "int3.channel.g64"}) {
    Page p = make_page(text, 96);
    const int n = p.codec.page_tokens, qmax = (1 << p.codec.bits) - 1;
    const bool by_channel = p.codec.granularity == Granularity::kChannel;
    std::vector<float> rows(static_cast<std::size_t>(n * 96));
    for (int t = 0; t < n; ++t) {  // all codes, both ends in every group: lo = -2, scale = 1/4
      for (int d = 0; d < 96; ++d) rows[static_cast<std::size_t>(t * 96 + d)] = -2 + 0.25f * static_cast<float>((by_channel ? t : d) * 37 % 32 * qmax / 31);
    }
    EncodeCounters counters;
    write_page(&p, rows, &counters);
    const std::vector<float> read = read_page(p);
    EXPECT_EQ(read, rows) << text;
    const std::vector<std::uint8_t> first = p.block;
    write_page(&p, read, &counters);
    EXPECT_EQ(p.block, first) << text;
  }
}

TEST(PageCodec, UnwrittenSlotsChangeNothing) {
  for (const char* text : {"int4.token.g32", "int3.channel.g32", "fp8e4m3.token.g", "q4_0"}) {
    Page p = make_page(text, 64), q = p;
    std::fill(q.block.begin(), q.block.end(), std::uint8_t{0x5A});
    std::vector<float> rows(64 * 64);
    calib::Rng rng(8);
    for (float& v : rows) v = static_cast<float>(rng.normal());
    EncodeCounters counters;
    std::vector<float> a(64), b(64);
    for (Page* page : {&p, &q}) {
      if (page->codec.granularity == Granularity::kChannel) encode_channel_group(page->codec, rows.data(), 64, 1, page->block.data(), &counters);
      else encode_row(page->codec, rows.data(), 40, page->block.data(), &counters);
    }
    decode_row(p.codec, p.block.data(), 40, a.data());
    decode_row(q.codec, q.block.data(), 40, b.data());
    EXPECT_EQ(a, b) << text;
  }
}

}  // namespace
}  // namespace kvrt
