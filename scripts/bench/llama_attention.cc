// Times one decode step of llama.cpp's CPU flash attention (ggml_flash_attn_ext) over a quantised cache: one query token, H * G query
// heads, head_dim 128, 32768 tokens. Usage: llama_attention TYPE H G THREADS SECONDS; TYPE q8_0, q4_0 or f16. Prints the median in ms.
// Built by scripts/bench/decode_attention --llama against ggml of the source archive that scripts/bench/llama_peer builds.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

namespace {

constexpr int kHeadDim = 128, kTokens = 32768;

void fill(ggml_tensor* t, unsigned seed) {
  std::vector<float> row(static_cast<std::size_t>(t->ne[0]));
  const std::int64_t n_rows = ggml_nrows(t);
  for (std::int64_t r = 0; r < n_rows; ++r) {
    for (float& x : row) {
      x = 0;
      for (int i = 0; i < 3; ++i) x += static_cast<float>(static_cast<int>(seed = seed * 1664525u + 1013904223u)) * 0x1p-31f;
    }
    char* out = static_cast<char*>(t->data) + r * static_cast<std::int64_t>(ggml_row_size(t->type, t->ne[0]));
    if (t->type == GGML_TYPE_F32) std::memcpy(out, row.data(), row.size() * sizeof(float));
    else ggml_quantize_chunk(t->type, row.data(), out, 0, 1, t->ne[0], nullptr);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return std::fprintf(stderr, "usage: llama_attention TYPE H G THREADS SECONDS\n"), 2;
  const ggml_type type = !std::strcmp(argv[1], "q8_0") ? GGML_TYPE_Q8_0 : !std::strcmp(argv[1], "q4_0") ? GGML_TYPE_Q4_0 : GGML_TYPE_F16;
  const int heads = std::atoi(argv[2]), group = std::atoi(argv[3]), threads = std::atoi(argv[4]);
  const std::size_t bytes = std::size_t{1} << 30;
  ggml_context* ctx = ggml_init({bytes, nullptr, false});
  ggml_tensor* q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kHeadDim, 1, heads * group);
  ggml_tensor* k = ggml_new_tensor_3d(ctx, type, kHeadDim, kTokens, heads);
  ggml_tensor* v = ggml_new_tensor_3d(ctx, type, kHeadDim, kTokens, heads);
  fill(q, 1), fill(k, 2), fill(v, 3);
  ggml_tensor* out = ggml_flash_attn_ext(ctx, q, k, v, nullptr, 1.0f / std::sqrt(static_cast<float>(kHeadDim)), 0.0f, 0.0f);
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, out);
  ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  ggml_threadpool* pool = ggml_threadpool_new(&params);
  ggml_cplan plan = ggml_graph_plan(graph, threads, pool);
  std::vector<std::uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  ggml_graph_compute(graph, &plan);
  std::vector<double> times;
  using Clock = std::chrono::steady_clock;
  for (const auto begin = Clock::now(); times.size() < 3 || std::chrono::duration<double>(Clock::now() - begin).count() < std::atof(argv[5]);) {
    const auto start = Clock::now();
    ggml_graph_compute(graph, &plan);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  std::printf("%.4f\n", times[times.size() / 2]);
  ggml_threadpool_free(pool);
  ggml_free(ctx);
}
