#pragma once
// Device code of the two-pass decode: score<K> writes fp32 scores, pv<V> reads them, so that any key family goes with any value
// family. One head tile a CTA; a CTA of either pass has the same chunk and heads. Scores lie as the products leave them:
// [CTA][tile of the chunk][lane][4].

#include "kernels/read/decode_fused.h"

namespace kvrt {

KVRT_DEVICE float* block_scores(const DecodeArgs& args) {
  return args.scores + static_cast<std::int64_t>(cuda::block_index()) * args.max_chunk_tiles * (4 * cuda::kWarp) + 4 * cuda::lane_index();
}

template <class Keys, class Shared>
KVRT_DEVICE void score_chunk(const DecodeArgs& args, const DecodeTask& task, Shared& shared) {
  typename Keys::template Query<1> query;
  load_queries<Keys, Shared, 1>(args, task, shared, query);
  const int begin = shared.tile_begin, end = shared.tile_end;
  float* const scores = block_scores(args);
  for (int tile = first_tile<Keys, 1>(begin); tile < end; tile = next_tile<Keys, 1>(tile, begin)) {
    float s[1][4];
    Keys::template score<1>(shared.k, shared.keys, place_tile(shared, tile, slots_of_tile(shared, tile).tile_slot), query, s);
    KVRT_UNROLL
    for (int i = 0; i < 4; ++i) s[0][i] += Keys::add(query, 0, i % 2);
    cuda::store_floats(scores + static_cast<std::int64_t>(tile - begin) * (4 * cuda::kWarp), s[0]);
  }
}

/// ExactKeys: of bf16 pages, exact ones or those of the family b16.
template <class Keys, class ExactKeys, int D>
KVRT_KERNEL(kDecodeThreads, D <= 128 ? 4 : 2) score_kernel(const DecodeArgs args) {
  using Shared = DecodeShared<Keys, D, 1>;
  KVRT_SHARED(Shared, shared);
  const DecodeTask task = start_task(args, shared);
  if (task.segment.k.codec.format == Format::kBf16) score_chunk<ExactKeys>(args, task, shared);
  else score_chunk<Keys>(args, task, shared);
}

/// Scores of the first pass in the place of keys.
struct StoredScores {
  static constexpr bool kOwnFragments = false;
  using Shared = NothingShared;
  template <int N>
  struct Query {
    const float* scores;
    int tile_begin;
  };
  KVRT_DEVICE static void prepare(const DecodeArgs&, const Segment&, Shared&) {}
  template <int N>
  KVRT_DEVICE static float add(const Query<N>&, int, int) { return 0.0f; }
  template <int N>
  KVRT_DEVICE static void score(const SideView&, const Shared&, const TilePlace& place, const Query<N>& query, float (&s)[N][4]) {
    static_assert(N == 1, "one head tile a CTA");
    cuda::load_floats(query.scores + static_cast<std::int64_t>(place.tile - query.tile_begin) * (4 * cuda::kWarp), s[0]);
  }
};

template <class Values, int D, class Shared>
KVRT_DEVICE void pv_chunk(const DecodeArgs& args, Shared& shared) {
  attend<StoredScores, Values, Shared, D, 1>(args, {block_scores(args), shared.tile_begin}, shared);
}

template <class Values, class ExactValues, int D>
KVRT_KERNEL(kDecodeThreads, decode_min_blocks(D, 1)) pv_kernel(const DecodeArgs args) {
  using Shared = DecodeShared<StoredScores, D, 1>;
  KVRT_SHARED(Shared, shared);
  if (start_task(args, shared).segment.v.codec.format == Format::kBf16) pv_chunk<ExactValues, D>(args, shared);
  else pv_chunk<Values, D>(args, shared);
}

template <DecodeFamily K, int D, bool kIsPadded>
Status launch_score(const DecodeArgs& args, void* stream) {
  return cuda::launch(&score_kernel<KeysOf<K, D, kIsPadded>, PlainKeys<D, true, kIsPadded>, D>, decode_blocks(args, 1), kDecodeThreads, args, stream);
}
template <DecodeFamily V, int D, bool kIsPadded>
Status launch_pv(const DecodeArgs& args, void* stream) {
  return cuda::launch(&pv_kernel<ValuesOf<V, D, kIsPadded>, PlainValues<D, true, kIsPadded>, D>, decode_blocks(args, 1), kDecodeThreads, args, stream);
}

}  // namespace kvrt
