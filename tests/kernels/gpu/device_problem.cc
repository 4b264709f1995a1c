#include "tests/kernels/gpu/device_problem.h"

#include <stdexcept>

#include "kernels/read/stream_cuda.h"

namespace kvrt::gpu {
namespace {
constexpr int kMaxStreamBlocks = 4096, kStreamThreads = 256;
}

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}
void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  check(cudaMalloc(&data_, bytes), "cudaMalloc");
  check(cudaMemset(data_, 0xFF, bytes), "cudaMemset");
}
Buffer::Buffer(const void* host, std::size_t bytes) : Buffer(bytes) { check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy"); }

DeviceProblem::DeviceProblem(const testing::DecodeProblem& problem, int n_copies)
    : problem_(problem), n_copies_(n_copies), stream_data_(static_cast<std::size_t>((problem.cache_bytes() * n_copies + 15) / 16 * 16)),
      stream_sums_(static_cast<std::size_t>(kMaxStreamBlocks * kStreamThreads) * sizeof(std::uint32_t)) {
  std::vector<Segment> segments;
  std::vector<DecodeChunk> chunks;
  std::vector<std::int64_t> first_chunk;
  std::vector<float> q;
  for (int copy = 0; copy < n_copies; ++copy) {
    const std::size_t first_region = memory_.size();
    const auto regions = problem.regions();
    for (const auto& r : regions) memory_.emplace_back(r.data, r.bytes);
    const auto on_device = [&](const void* host) -> const void* {
      for (std::size_t i = 0; i < regions.size(); ++i) {
        const auto offset = static_cast<const char*>(host) - static_cast<const char*>(regions[i].data);
        if (offset >= 0 && static_cast<std::size_t>(offset) < regions[i].bytes) return memory_[first_region + i].as<const char>() + offset;
      }
      throw std::runtime_error("a segment points outside the problem's memory");
    };
    const auto segment_base = static_cast<std::int32_t>(segments.size());
    const auto row_base = static_cast<std::int32_t>(copy * 2 * problem.n_rows());  // queries come in two frames
    const auto chunk_base = static_cast<std::int64_t>(chunks.size());
    for (Segment s : problem.segments()) {
      s.k.pool = static_cast<const std::uint8_t*>(on_device(s.k.pool));
      s.v.pool = static_cast<const std::uint8_t*>(on_device(s.v.pool));
      s.pages = static_cast<const std::int32_t*>(on_device(s.pages));
      for (SegmentSide* side : {&s.k, &s.v}) {
        if (side->mean) side->mean = static_cast<const float*>(on_device(side->mean));
        if (side->codec.channel_ranges) side->codec.channel_ranges = static_cast<const StaticRange*>(on_device(side->codec.channel_ranges));
      }
      segments.push_back(s);
    }
    for (DecodeChunk c : problem.chunks()) c.segment += segment_base, c.row += row_base, chunks.push_back(c);
    for (std::int64_t row = 0; row < problem.n_rows(); ++row) first_chunk.push_back(chunk_base + problem.first_chunk()[static_cast<std::size_t>(row)]);
    q.insert(q.end(), problem.q().begin(), problem.q().end());
  }
  first_chunk.push_back(static_cast<std::int64_t>(chunks.size()));
  const auto upload = [&](const auto& v) {
    arrays_.emplace_back(v.data(), v.size() * sizeof(v[0]));
    return arrays_.size() - 1;
  };
  const auto allocate = [&](std::size_t n) {
    arrays_.emplace_back(n * sizeof(float));
    return arrays_.back().as<float>();
  };
  const auto heads = static_cast<std::size_t>(problem.spec().n_query_heads), dim = static_cast<std::size_t>(problem.spec().head_dim);
  decode_.segments = arrays_[upload(segments)].as<Segment>();
  decode_.chunks = arrays_[upload(chunks)].as<DecodeChunk>();
  decode_.q = arrays_[upload(q)].as<float>();
  decode_.n_chunks = static_cast<std::int64_t>(chunks.size());
  decode_.n_query_heads = problem.spec().n_query_heads, decode_.head_dim = problem.spec().head_dim;
  decode_.partials = {allocate(chunks.size() * heads), allocate(chunks.size() * heads), allocate(chunks.size() * heads * dim)};
  decode_.soft_cap = problem.soft_cap(), decode_.max_chunk_tiles = problem.max_chunk_tiles();
  if (problem.path() == DecodePath::kTwoPass) decode_.scores = allocate(static_cast<std::size_t>(score_floats(decode_)));
  combine_.partials = decode_.partials;
  combine_.first_chunk = arrays_[upload(first_chunk)].as<std::int64_t>();
  combine_.n_rows = problem.n_rows() * n_copies;
  combine_.n_query_heads = decode_.n_query_heads, combine_.head_dim = decode_.head_dim, combine_.n_kv_heads = problem.spec().n_kv_heads;
  combine_.out.data = allocate(static_cast<std::size_t>(combine_.n_rows) * heads * dim);
  combine_.log_sum_exp = allocate(static_cast<std::size_t>(combine_.n_rows) * heads);
}

void DeviceProblem::launch(cudaStream_t stream) const {
  check(decode_cuda(decode_, problem_.unit(), problem_.path(), stream));
  check(combine_cuda(combine_, stream));
}

void DeviceProblem::launch_stream(cudaStream_t stream, int n_blocks) const {
  StreamArgs args{};
  args.data = stream_data_.as<std::uint8_t>(), args.bytes = static_cast<std::int64_t>(stream_data_.bytes());
  args.n_blocks = n_blocks < kMaxStreamBlocks ? n_blocks : kMaxStreamBlocks, args.sums = stream_sums_.as<std::uint32_t>();
  check(stream_cuda(args, stream));
}

testing::DecodeResult DeviceProblem::result() const {
  const auto rows = static_cast<std::size_t>(problem_.n_rows()), heads = static_cast<std::size_t>(decode_.n_query_heads);
  testing::DecodeResult result;
  result.out.resize(rows * heads * static_cast<std::size_t>(decode_.head_dim)), result.log_sum_exp.resize(rows * heads);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(result.out.data(), combine_.out.data, result.out.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(result.log_sum_exp.data(), combine_.log_sum_exp, result.log_sum_exp.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return result;
}

}  // namespace kvrt::gpu
