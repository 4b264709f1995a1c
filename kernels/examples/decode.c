/* The smallest decode loop: one sequence, one layer of a plan. usage: decode plan.json [tokens] [layer] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "kernels/kvrt.h"

static kvrt_error err;
#define TRY(call) do { if ((call) != KVRT_OK) { fprintf(stderr, "%s: %s\n", kvrt_status_name(err.status), err.text); return 1; } } while (0)

static float wave(int64_t i) { return (float)sin((double)(i % 8191) * 12.9898); } /* stands for what the model computes */

static void* pool_memory(const kvrt_context* context, int32_t layer, kvrt_side side, kvrt_segment segment, int64_t n_pages, kvrt_pool* pool) {
  kvrt_layout layout;
  if (kvrt_page_layout(context, layer, side, segment, &layout, &err) != KVRT_OK) return NULL;
  pool->page_stride = layout.page_bytes, pool->n_pages = n_pages;
  return pool->base = malloc((size_t)(n_pages * layout.page_bytes + 1));
}

int main(int argc, char** argv) {
  const int64_t n_tokens = argc > 2 ? atoll(argv[2]) : 300;
  const int32_t layer = argc > 3 ? atoi(argv[3]) : 0;
  kvrt_limits limits = {.max_batch = 1, .max_length = n_tokens};
  kvrt_plan* plan;
  kvrt_context* context;
  kvrt_plan_view view;
  if (argc < 2) return fprintf(stderr, "usage: decode plan.json [tokens] [layer]\n"), 2;
  TRY(kvrt_plan_load(argv[1], NULL, &plan, &err));
  TRY(kvrt_plan_describe(plan, &view, &err));
  TRY(kvrt_context_create(plan, NULL, &limits, &context, &err));
  if (!kvrt_describe(context, layer)) return fprintf(stderr, "no layer %d\n", (int)layer), 2;
  const kvrt_layer_view* shape = view.layers;
  while (shape->index != layer) ++shape;
  const int64_t row = (int64_t)shape->n_kv_heads * shape->head_dim, q_row = (int64_t)shape->n_q_heads * shape->head_dim;

  int64_t n_pages[KVRT_SEGMENTS], n_exact;
  TRY(kvrt_pages_needed(context, layer, n_tokens, n_pages, &err));
  n_exact = n_pages[KVRT_SINK] + n_pages[KVRT_WINDOW];
  kvrt_pools pools = {0};
  for (int side = 0; side < KVRT_SIDES; ++side)
    if (!pool_memory(context, layer, (kvrt_side)side, KVRT_WINDOW, n_exact, &pools.exact[side]) ||
        !pool_memory(context, layer, (kvrt_side)side, KVRT_BASE, n_pages[KVRT_BASE], &pools.base[side])) return 1;
  int32_t* ids = malloc((size_t)(n_exact + n_pages[KVRT_BASE] + 1) * sizeof *ids); /* one sequence: page i is the i-th of its pool */
  for (int64_t i = 0; i < n_exact + n_pages[KVRT_BASE]; ++i) ids[i] = (int32_t)(i < n_exact ? i : i - n_exact);
  int64_t sink[2] = {0, n_pages[KVRT_SINK]}, window[2] = {n_pages[KVRT_SINK], n_exact}, base[2] = {n_exact, n_exact + n_pages[KVRT_BASE]};
  kvrt_workspace workspace = {malloc((size_t)kvrt_workspace_bytes(context)), kvrt_workspace_bytes(context)};
  float *k = malloc((size_t)row * sizeof *k), *v = malloc((size_t)row * sizeof *v), *q = malloc((size_t)q_row * sizeof *q), *out = malloc((size_t)q_row * sizeof *out);

  for (int64_t t = 0; t < n_tokens; ++t) { /* the model's work goes here: k and q before RoPE, v */
    for (int64_t i = 0; i < row; ++i) k[i] = wave(t * row + i), v[i] = wave(7 * t * row + i);
    for (int64_t i = 0; i < q_row; ++i) q[i] = wave(3 * t * q_row + i);
    const int64_t rows[2] = {0, 1};
    const kvrt_batch batch = {.n_seqs = 1, .seq_len = &t, .row_offsets = rows, .positions = &t,
                              .pages = {{ids, sink}, {ids, window}, {ids, base}, {NULL, NULL}}};
    const kvrt_qkv qkv = {{k, KVRT_F32, 0, 0}, {v, KVRT_F32, 0, 0}, KVRT_PRE_ROPE};
    const kvrt_attn attn = {.q = {q, KVRT_F32, 0, 0}, .q_frame = KVRT_PRE_ROPE, .out = {out, KVRT_F32, 0, 0}};
    TRY(kvrt_append(context, layer, &batch, &qkv, &pools, &workspace, NULL, &err));
    TRY(kvrt_decode(context, layer, &batch, &attn, &pools, &workspace, NULL, &err));
  }
  printf("%s\n%lld tokens, %lld bytes; out[0] = %.6f\n", kvrt_describe(context, layer), (long long)n_tokens,
         (long long)(kvrt_cache_bytes(plan, layer, KVRT_K, n_tokens) + kvrt_cache_bytes(plan, layer, KVRT_V, n_tokens)), (double)out[0]);
  kvrt_context_destroy(context);
  kvrt_plan_release(plan);
  return 0;
}
