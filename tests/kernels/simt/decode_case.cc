#include "tests/kernels/simt/decode_case.h"

#include <cmath>

#include "gtest/gtest.h"

namespace kvrt::simt {

DecodeCase::Output DecodeCase::run(const Settings& settings, DecodePath taken) const {
  const auto heads = static_cast<std::size_t>(spec().n_query_heads), dim = static_cast<std::size_t>(spec().head_dim);
  const std::size_t n = chunks().size() * heads, n_out = static_cast<std::size_t>(n_rows()) * heads;
  std::vector<float> m(n, NAN), l(n, NAN), o(n * dim, NAN);
  DecodeArgs args{};
  args.segments = segments().data(), args.chunks = chunks().data(), args.n_chunks = static_cast<std::int64_t>(chunks().size());
  args.q = q().data(), args.n_query_heads = spec().n_query_heads, args.head_dim = spec().head_dim;
  args.partials = {m.data(), l.data(), o.data()};
  args.soft_cap = soft_cap(), args.max_chunk_tiles = max_chunk_tiles();
  std::vector<float> scores(static_cast<std::size_t>(score_floats(args)) + 4, NAN);
  args.scores = scores.data() + (reinterpret_cast<std::uintptr_t>(scores.data()) % 16 ? 4 - reinterpret_cast<std::uintptr_t>(scores.data()) % 16 / 4 : 0);

  Output output;
  output.out.assign(n_out * dim, NAN);
  output.log_sum_exp.assign(n_out, NAN);
  const Executor executor(settings);
  if (const Status s = decode_cuda(args, unit(), taken, nullptr); !s.ok()) output.error = s.text();
  output.counts = executor.counts();
  CombineArgs combine{};
  combine.partials = args.partials, combine.first_chunk = first_chunk().data(), combine.n_rows = n_rows();
  combine.n_query_heads = spec().n_query_heads, combine.head_dim = spec().head_dim, combine.n_kv_heads = spec().n_kv_heads;
  combine.out.data = output.out.data(), combine.log_sum_exp = output.log_sum_exp.data();
  if (const Status s = combine_cuda(combine, nullptr); !s.ok() && output.error.empty()) output.error = s.text();
  return output;
}

void DecodeCase::expect_close(const Output& output, const std::string& what) const {
  ASSERT_EQ(output.error, "") << what;
  EXPECT_LE(worst_ratio(output), 1.0) << what;
  EXPECT_LE(worst_log_sum_exp_ratio(output), 1.0) << what;
}

DecodeCase::Output run_in_all_orders(const DecodeCase& decode, Accumulation accumulation) { return run_in_all_orders(decode, accumulation, decode.path()); }

DecodeCase::Output run_in_all_orders(const DecodeCase& decode, Accumulation accumulation, DecodePath taken) {
  Settings settings;
  settings.accumulation = accumulation;
  const DecodeCase::Output forward = decode.run(settings, taken);
  for (const Order order : {Order::kReverse, Order::kShuffled}) {
    settings.order = order;
    const DecodeCase::Output other = decode.run(settings, taken);
    EXPECT_EQ(other.error, forward.error);
    EXPECT_EQ(other.out, forward.out) << "results depend on the order of threads";
    EXPECT_EQ(other.log_sum_exp, forward.log_sum_exp);
  }
  return forward;
}

}  // namespace kvrt::simt
