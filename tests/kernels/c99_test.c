/* kvrt.h as C99: a plan from structs, one token in, the same token out. Exit 0 if all is as expected. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kvrt.h"

#define EXPECT(condition)                                                   \
  do {                                                                      \
    if (!(condition)) {                                                     \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, err.text); \
      return 1;                                                             \
    }                                                                       \
  } while (0)

enum { kHeads = 2, kWidth = 32, kRow = kHeads * kWidth };

int main(void) {
  kvrt_error err = {KVRT_OK, ""};
  kvrt_layer_view layer;
  kvrt_plan_view view;
  memset(&layer, 0, sizeof layer);
  memset(&view, 0, sizeof view);
  layer.n_q_heads = layer.n_kv_heads = kHeads, layer.head_dim = kWidth;
  layer.attention_factor = 1, layer.softmax_scale = 0.25;
  layer.k.scheme = "int8.token.g", layer.v.scheme = "int4.token.g";
  view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
  kvrt_plan* plan = NULL;
  EXPECT(kvrt_plan_adopt(&view, &plan, &err) == KVRT_OK);
  const kvrt_limits limits = {.max_batch = 1, .max_length = 8};
  kvrt_context* context = NULL;
  EXPECT(kvrt_context_create(plan, NULL, &limits, &context, &err) == KVRT_OK);
  EXPECT(strstr(kvrt_describe(context, 0), "K int8.token.g, V int4.token.g") != NULL);

  kvrt_pools pools;
  memset(&pools, 0, sizeof pools);
  for (int side = 0; side < KVRT_SIDES; ++side) {
    kvrt_layout layout;
    EXPECT(kvrt_page_layout(context, 0, (kvrt_side)side, KVRT_BASE, &layout, &err) == KVRT_OK);
    pools.base[side].base = malloc((size_t)layout.page_bytes);
    pools.base[side].n_pages = 1;
    memset(pools.base[side].base, 0xFF, (size_t)layout.page_bytes);
  }
  const int64_t bytes = kvrt_workspace_bytes(context);
  kvrt_workspace workspace = {malloc((size_t)bytes), bytes};
  float x[kRow], out[kRow], lse[kHeads];
  for (int i = 0; i < kRow; ++i) x[i] = (float)(i % 11) - 5.0f;
  const int64_t length = 0, rows[2] = {0, 1}, position = 0, offsets[2] = {0, 1};
  const int32_t page = 0;
  const kvrt_batch batch = {.n_seqs = 1, .seq_len = &length, .row_offsets = rows, .positions = &position, .pages = {[KVRT_BASE] = {&page, offsets}}};
  const kvrt_qkv qkv = {.k = {.data = x}, .v = {.data = x}, .k_frame = KVRT_PRE_ROPE};
  const kvrt_attn attn = {.q = {.data = x}, .out = {.data = out}, .lse = lse};
  EXPECT(kvrt_append(context, 0, &batch, &qkv, &pools, &workspace, NULL, &err) == KVRT_OK);
  EXPECT(kvrt_decode(context, 0, &batch, &attn, &pools, &workspace, NULL, &err) == KVRT_OK);
  for (int i = 0; i < kRow; ++i) EXPECT(fabsf(out[i] - x[i]) < 0.34f); /* half a step of 10 / 15 */
  EXPECT(kvrt_decode(context, 0, &batch, NULL, &pools, &workspace, NULL, &err) == KVRT_E_ARGUMENT);
  EXPECT(strcmp(err.text, "attn is null") == 0);
  kvrt_context_destroy(context);
  kvrt_plan_release(plan);
  puts("ok");
  return 0;
}
