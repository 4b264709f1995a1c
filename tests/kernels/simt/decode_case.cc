#include "tests/kernels/simt/decode_case.h"

#include <cmath>

#include "tests/kernels/schemes.h"

namespace kvrt::simt {

DecodeOutput run_decode(DecodeArgs args, const DecodeUnit& unit, DecodePath path, const std::vector<std::int64_t>& first_chunk, int n_kv_heads,
                        const Settings& settings) {
  const std::size_t heads = static_cast<std::size_t>(args.n_query_heads), dim = static_cast<std::size_t>(args.head_dim);
  const std::size_t n = static_cast<std::size_t>(args.n_chunks) * heads, n_out = (first_chunk.size() - 1) * heads;
  std::vector<float> m(n, NAN), l(n, NAN), o(n * dim, NAN);
  args.partials = {m.data(), l.data(), o.data()};
  std::vector<float> scores(static_cast<std::size_t>(score_floats(args)) + 4, NAN);
  args.scores = scores.data() + (reinterpret_cast<std::uintptr_t>(scores.data()) % 16 ? 4 - reinterpret_cast<std::uintptr_t>(scores.data()) % 16 / 4 : 0);

  DecodeOutput output;
  output.out.assign(n_out * dim, NAN);
  output.log_sum_exp.assign(n_out, NAN);
  const Executor executor(settings);
  if (const Status s = decode_cuda(args, unit, path, nullptr); !s.ok()) output.error = s.text();
  output.counts = executor.counts();
  CombineArgs combine{};
  combine.partials = args.partials, combine.first_chunk = first_chunk.data(), combine.n_rows = static_cast<std::int64_t>(first_chunk.size()) - 1;
  combine.n_query_heads = args.n_query_heads, combine.head_dim = args.head_dim, combine.n_kv_heads = n_kv_heads;
  combine.out.data = output.out.data(), combine.log_sum_exp = output.log_sum_exp.data();
  if (const Status s = combine_cuda(combine, nullptr); !s.ok() && output.error.empty()) output.error = s.text();
  return output;
}

DecodeOutput run_in_all_orders(Accumulation accumulation, const std::function<DecodeOutput(const Settings&)>& run) {
  Settings settings;
  settings.accumulation = accumulation;
  const DecodeOutput forward = run(settings);
  for (const Order order : {Order::kReverse, Order::kShuffled}) {
    settings.order = order;
    const DecodeOutput other = run(settings);
    EXPECT_EQ(other.error, forward.error);
    EXPECT_EQ(other.out, forward.out) << "results depend on the order of threads";
    EXPECT_EQ(other.log_sum_exp, forward.log_sum_exp);
  }
  return forward;
}

void expect_within(const DecodeOutput& output, double ratio, double log_sum_exp_ratio, const std::string& what) {
  ASSERT_EQ(output.error, "") << what;
  EXPECT_LE(ratio, 1.0) << what;
  EXPECT_LE(log_sum_exp_ratio, 1.0) << what;
}

DecodeOutput DecodeCase::run(const Settings& settings, DecodePath taken) const {
  DecodeArgs args{};
  args.segments = segments().data(), args.chunks = chunks().data(), args.n_chunks = static_cast<std::int64_t>(chunks().size());
  args.q = q().data(), args.n_query_heads = spec().n_query_heads, args.head_dim = spec().head_dim;
  args.soft_cap = soft_cap(), args.max_chunk_tiles = max_chunk_tiles();
  return run_decode(args, unit(), taken, first_chunk(), spec().n_kv_heads, settings);
}

void PrintTo(const SchemePair& pair, std::ostream* out) { *out << pair.k << " " << pair.v; }
std::string name_of_pair(const ::testing::TestParamInfo<std::tuple<SchemePair, int>>& info) {
  const auto& [pair, head_dim] = info.param;
  return testing::test_name(std::string(pair.k) + "_" + pair.v + "_D" + std::to_string(head_dim));
}

}  // namespace kvrt::simt
