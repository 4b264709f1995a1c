// The oracle of the vector paths: write real pages with the scalar page codecs, read them back.

#include <algorithm>
#include <vector>

#include "kernels/write/frame.h"

namespace kvrt {

Status fake_quant_reference(const FakeQuantArgs& args, FakeQuantCounters* counters) {
  FakeQuantJob job;
  if (Status status = make_fake_quant_job(args, &job); !status.ok()) return status;
  FakeQuantCounters ignored;
  FakeQuantCounters* const count = counters ? counters : &ignored;
  const bool by_channel = job.scheme.granularity == Granularity::kChannel;
  const int page_tokens = job.page_tokens, d = job.head_dim, width = job.width;
  PageCodec codec = page_codec_of(job, page_tokens);
  // 4 bytes a code and 4 a parameter bound every format; slots nobody writes keep 0xFF.
  std::vector<std::uint8_t> block(static_cast<std::size_t>(page_tokens) * static_cast<std::size_t>(d + 32) * 8, 0xFF);
  std::vector<float> rows(static_cast<std::size_t>(page_tokens) * static_cast<std::size_t>(d));
  std::vector<StaticRange> ranges(job.scheme.granularity == Granularity::kChannelStatic ? static_cast<std::size_t>(d) : 1);
  for (int head = 0; head < job.n_heads; ++head) {
    const StaticGrids g = static_grids(job, head);
    for (std::size_t c = 0; g.lo && c < ranges.size(); ++c) ranges[c] = {g.lo[c], g.scale[c], g.min[c], g.max[c]};
    codec.range = ranges[0];
    codec.channel_ranges = ranges.data();
    if (job.ef_u) {
      codec.ef_u = job.ef_u + static_cast<std::int64_t>(head) * d * (d + 1) / 2;
      codec.ef_order = job.ef_order + static_cast<std::int64_t>(head) * d;
    }
    for (std::int64_t first = 0; first < job.n_tokens; first += page_tokens) {
      const int n = static_cast<int>(std::min<std::int64_t>(page_tokens, job.n_tokens - first));
      for (int t = 0; t < n; ++t) to_frame(job, head, job.x + (first + t) * job.x_stride + head * d, &rows[static_cast<std::size_t>(t) * width], count);
      for (int t = 0; t < n && !by_channel; ++t) encode_row(codec, &rows[static_cast<std::size_t>(t) * width], t, block.data(), count);
      for (int t = 0; t < n && by_channel; t += job.group) {
        encode_channel_group(codec, &rows[static_cast<std::size_t>(t) * width], width, t / job.group, block.data(), count);
      }
      for (int t = 0; t < n; ++t) {
        decode_row(codec, block.data(), t, &rows[static_cast<std::size_t>(t) * width]);
        from_frame(job, head, &rows[static_cast<std::size_t>(t) * width], job.out + (first + t) * job.out_stride + head * d);
      }
    }
  }
  return {};
}

}  // namespace kvrt
