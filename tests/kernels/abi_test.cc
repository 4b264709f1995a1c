// One test a status code, and what a caller can get wrong.

#include <cstdlib>

#include "gmock/gmock.h"
#include "tests/kernels/cache_fixture.h"

namespace kvrt::testing {
namespace {

using ::testing::HasSubstr;

/// append or decode of one row on a cache of 40 tokens; `change` spoils the call.
struct Step {
  kvrt_batch batch;
  kvrt_qkv qkv = {};
  kvrt_attn attn = {};
  kvrt_pools pools;
  kvrt_workspace workspace;
  int layer = Cache::kLayer;
  void* stream = nullptr;
};
template <class Change>
kvrt_error spoiled(Change change, bool decodes = false, CacheShape shape = {}) {
  Cache cache(shape);
  EXPECT_TRUE(cache.status().ok()) << cache.status().text();
  const std::vector<float> k = normal_rows(41, 101 * cache.row()), q = normal_rows(42, 2 * cache.q_row());
  std::vector<float> out(q.size());
  EXPECT_TRUE(cache.append(100, k.data(), k.data()).ok());
  Step s{cache.batch({1}), {}, cache.attn(q.data(), out.data()), cache.pools(), cache.workspace()};
  s.qkv.k.data = s.qkv.v.data = k.data() + 100 * cache.row(), s.qkv.k_frame = KVRT_PRE_ROPE;
  change(&s);
  kvrt_error err = {KVRT_OK, ""};
  const kvrt_status code = decodes ? kvrt_decode(cache.context(), s.layer, &s.batch, &s.attn, &s.pools, &s.workspace, s.stream, &err)
                                   : kvrt_append(cache.context(), s.layer, &s.batch, &s.qkv, &s.pools, &s.workspace, s.stream, &err);
  EXPECT_EQ(code, err.status);
  return err;
}
#define EXPECT_ERROR(err, code, words)                    \
  do {                                                    \
    const kvrt_error e_ = (err);                          \
    EXPECT_EQ(e_.status, code) << e_.text;                \
    EXPECT_THAT(std::string(e_.text), HasSubstr(words));  \
  } while (0)

TEST(Abi, AnUnspoiledStepWorks) {
  EXPECT_EQ(spoiled([](Step*) {}).status, KVRT_OK);
  EXPECT_EQ(spoiled([](Step*) {}, true).status, KVRT_OK);
}

TEST(Abi, Argument) {
  std::vector<std::int64_t> i64(8);
  std::vector<std::int32_t> ids(64, 0);
  EXPECT_ERROR(spoiled([](Step* s) { s->layer = 4; }), KVRT_E_ARGUMENT, "layer 4 has no KV");
  if (!kOnCuda) {
    EXPECT_ERROR(spoiled([](Step* s) { s->stream = s; }), KVRT_E_ARGUMENT, "stream");
  }
  EXPECT_ERROR(spoiled([](Step* s) { s->workspace.data = nullptr; }), KVRT_E_ARGUMENT, "workspace");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.seq_len = nullptr; }), KVRT_E_ARGUMENT, "seq_len");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.positions = nullptr; }), KVRT_E_ARGUMENT, "positions is null");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.n_seqs = -1; }), KVRT_E_ARGUMENT, "n_seqs");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {3, 1}; s->batch.row_offsets = i64.data(); }), KVRT_E_ARGUMENT, "row_offsets fall from 3 to 1");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {-5}; s->batch.seq_len = i64.data(); }), KVRT_E_ARGUMENT, "seq_len is -5");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {99}; s->batch.positions = i64.data(); }), KVRT_E_ARGUMENT, "token 100 at position 99");
  EXPECT_ERROR(spoiled([&](Step* s) {
                 i64 = {100, 102, 0, 2};
                 s->batch.positions = i64.data(), s->batch.row_offsets = i64.data() + 2;
               }),
               KVRT_E_ARGUMENT, "expected 101");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {100, -1, 102, 0, 3}; s->batch.positions = i64.data(), s->batch.row_offsets = i64.data() + 3; }), KVRT_E_ARGUMENT,
               "behind a row without token");
  EXPECT_ERROR(spoiled([](Step* s) { s->pools.base[KVRT_V].base = nullptr; }), KVRT_E_ARGUMENT, "layer 5 V int4.token.g: the base pool is null");
  for (const int bad : {-1, 1 << 30, INT32_MIN}) {  // page ids out of range
    EXPECT_ERROR(spoiled([&](Step* s) {
                   ids.assign(64, bad);
                   i64 = {0, 64};
                   s->batch.pages[KVRT_BASE] = {ids.data(), i64.data()};
                 }),
                 KVRT_E_ARGUMENT, "base page 0 has id");
  }
  // Two places in one page: ring pages that would overwrite each other, and a coded page that is written a second time.
  const auto repeated = [&](kvrt_segment which) {
    return spoiled([&](Step* s) { ids.assign(64, 0), i64 = {0, 64}; s->batch.pages[which] = {ids.data(), i64.data()}; });
  };
  EXPECT_ERROR(repeated(KVRT_WINDOW), KVRT_E_ARGUMENT, "page 0 stands twice among its sink and window pages");
  EXPECT_ERROR(repeated(KVRT_BASE), KVRT_E_ARGUMENT, "page 0 stands twice among its base pages");
  EXPECT_ERROR(spoiled([](Step* s) { s->qkv.k.data = nullptr; }), KVRT_E_ARGUMENT, "k is null");
  EXPECT_ERROR(spoiled([](Step* s) { s->qkv.v.dtype = static_cast<kvrt_dtype>(9); }), KVRT_E_ARGUMENT, "v: unknown dtype 9");
  EXPECT_ERROR(spoiled([](Step* s) { s->qkv.v.row_stride = 8; }), KVRT_E_ARGUMENT, "stride 8");
  CacheShape pre;
  pre.k = "int4.channel.g32.pre";
  EXPECT_ERROR(spoiled([](Step* s) { s->qkv.k_frame = KVRT_POST_ROPE; }, false, pre), KVRT_E_ARGUMENT, "stores keys before RoPE");
  EXPECT_ERROR(spoiled([](Step* s) { s->attn.out.data = nullptr; }, true), KVRT_E_ARGUMENT, "out is null");
  EXPECT_ERROR(spoiled([](Step* s) { s->attn.soft_cap = -1; }, true), KVRT_E_ARGUMENT, "soft_cap");
  EXPECT_ERROR(spoiled([](Step* s) { s->attn.softmax_scale = NAN; }, true), KVRT_E_ARGUMENT, "softmax_scale");
}

TEST(Abi, Capacity) {
  std::vector<std::int64_t> i64(4);
  EXPECT_ERROR(spoiled([](Step* s) { s->workspace.bytes = 8; }), KVRT_E_CAPACITY, "workspace of 8 bytes");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.n_seqs = 2; }), KVRT_E_CAPACITY, "max_batch is 1");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {512}; s->batch.seq_len = i64.data(); }), KVRT_E_CAPACITY, "max_length is 512");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {512}; s->batch.positions = i64.data(); }), KVRT_E_CAPACITY, "position 512");
  EXPECT_ERROR(spoiled([&](Step* s) { i64 = {0, 1}; s->batch.pages[KVRT_WINDOW].offsets = i64.data(); }), KVRT_E_CAPACITY, "1 window pages, needs 3");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.pages[KVRT_BASE] = {}; }), KVRT_E_CAPACITY, "0 base pages, needs 2");
  EXPECT_ERROR(spoiled([](Step* s) { s->pools.exact[KVRT_K].page_stride = 64; }), KVRT_E_CAPACITY, "page_stride 64");
}

TEST(Abi, Unsupported) {
  const std::uint8_t flag = 0;
  const std::int64_t rows[] = {0, 2}, positions[] = {100, 101};
  EXPECT_ERROR(spoiled([&](Step* s) { s->batch.sink_flags = &flag; }), KVRT_E_UNSUPPORTED, "sink_flags");
  EXPECT_ERROR(spoiled([](Step* s) { s->batch.pages[KVRT_SALIENT] = s->batch.pages[KVRT_BASE]; }), KVRT_E_UNSUPPORTED, "salient");
  EXPECT_ERROR(spoiled([](Step* s) { s->attn.sliding_window = 100; }, true), KVRT_E_UNSUPPORTED, "sliding_window");
  EXPECT_ERROR(spoiled([&](Step* s) { s->batch.row_offsets = rows, s->batch.positions = positions; }, true), KVRT_E_UNSUPPORTED, "2 query tokens");
  kvrt_error err;
  EXPECT_EQ(kvrt_schedule(nullptr, nullptr, nullptr, nullptr, &err), KVRT_E_UNSUPPORTED);
  EXPECT_EQ(kvrt_requant(nullptr, 0, nullptr, nullptr, nullptr, &err), KVRT_E_UNSUPPORTED);
  CacheShape shape;
  shape.k = "int4.token.g.pre.lowrank8";
  EXPECT_EQ(Cache(shape).status().code(), Code::kUnsupported);
  EXPECT_THAT(Cache(shape).status().text(), HasSubstr("'lowrank8' is not offered"));
  shape.k = "int4.token.g", shape.backend = KVRT_BACKEND_CUDA;
  if (!kOnCuda) {
    EXPECT_THAT(Cache(shape).status().text(), HasSubstr("backend cuda is not in this build; it offers ref and cpu"));
  }
}

struct Reports {
  std::vector<std::string> missing;
  int n = 0;
  static void add(void* user, const kvrt_unit_report* r) {
    auto* self = static_cast<Reports*>(user);
    ++self->n;
    if (r->path == KVRT_PATH_MISSING) self->missing.push_back(std::string(r->scheme) + " | " + r->reason + " | " + r->nearest);
  }
};

TEST(Abi, PlanCheckListsEveryGap) {  // bug class 7
  CacheShape shape;
  Cache whole(shape);
  Reports reports;
  kvrt_error err;
  EXPECT_EQ(kvrt_plan_check(whole.plan(), nullptr, &Reports::add, &reports, &err), KVRT_OK);
  EXPECT_EQ(reports.n, 2);
  EXPECT_TRUE(reports.missing.empty());

  kvrt_layer_view layer = whole.layer_view();
  const testing::UnitConstants k("int4.token.g.pre.lowrank8", 2, 64, 64), v("int2.token.g12.lowrank24", 2, 64, 64);
  layer.k = k.view(), layer.v = v.view();
  kvrt_plan_view view = {};
  view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
  PlanHandle plan;
  ASSERT_TRUE(PlanHandle::adopt(view, &plan).ok());
  EXPECT_EQ(kvrt_plan_check(plan.get(), nullptr, &Reports::add, &reports, &err), KVRT_E_UNSUPPORTED);
  ASSERT_EQ(reports.missing.size(), 2u);
  EXPECT_THAT(reports.missing[0], HasSubstr("'lowrank8' is not offered"));
  EXPECT_THAT(reports.missing[0], ::testing::EndsWith("| int4.token.g.pre"));
  EXPECT_THAT(reports.missing[1], ::testing::EndsWith("| int2.token.g"));
  kvrt_plan_view described;
  ASSERT_EQ(kvrt_plan_describe(plan.get(), &described, &err), KVRT_OK);
  EXPECT_EQ(described.layers[0].k.basis[8 * 128 - 1], k.basis.back());
  EXPECT_EQ(described.layers[0].v.basis_in[24 * 128 - 1], v.basis_in.back());
  EXPECT_EQ(described.layers[0].v.basis_mean[127], 0.25f);

  // Only what is missing goes.
  layer = whole.layer_view();
  layer.rope_style = KVRT_ROPE_NONE, layer.rotary_dim = 0;
  layer.k.scheme = "int4.channel.g32.pair";
  ASSERT_TRUE(PlanHandle::adopt(view, &plan).ok());
  reports.missing.clear();
  EXPECT_EQ(kvrt_plan_check(plan.get(), nullptr, &Reports::add, &reports, &err), KVRT_E_UNSUPPORTED);
  ASSERT_EQ(reports.missing.size(), 1u);
  EXPECT_EQ(reports.missing[0], "int4.channel.g32.pair | pair: the layer has no RoPE | int4.channel.g32");
  EXPECT_THAT(std::string(err.text), HasSubstr("; nearest: int4.channel.g32"));

  layer = whole.layer_view();
  layer.sliding_window = 64;
  ASSERT_TRUE(PlanHandle::adopt(view, &plan).ok());
  EXPECT_EQ(kvrt_plan_check(plan.get(), nullptr, nullptr, nullptr, &err), KVRT_E_UNSUPPORTED);
  EXPECT_THAT(std::string(err.text), HasSubstr("sliding window (64 keys)"));
  EXPECT_THAT(std::string(err.text), ::testing::Not(HasSubstr("nearest")));  // no scheme would do
}

TEST(Abi, AForcedBackendIsReallyTaken) {  // bug class 7
  ::setenv("KVRT_FORCE_BACKEND", "ref", 1);
  const Cache forced{CacheShape()};
  EXPECT_THAT(std::string(kvrt_describe(forced.context(), Cache::kLayer)), HasSubstr("layer 5: ref, K int4.token.g, V int4.token.g"));
  ::setenv("KVRT_FORCE_BACKEND", "abacus", 1);
  const Cache unknown{CacheShape()};
  ::unsetenv("KVRT_FORCE_BACKEND");
  EXPECT_EQ(unknown.status().code(), Code::kUnsupported);
  EXPECT_THAT(unknown.status().text(), HasSubstr("'abacus'"));
  EXPECT_EQ(kvrt_describe(forced.context(), 0), nullptr);
}

TEST(Abi, Format) {
  Cache cache{CacheShape()};
  const auto adopt = [&](auto change) {
    kvrt_layer_view layer = cache.layer_view();
    kvrt_plan_view view = {};
    view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
    change(&view, &layer);
    PlanHandle plan;
    const Status status = PlanHandle::adopt(view, &plan);
    EXPECT_EQ(plan.get(), nullptr);
    return status;
  };
  const float mean[] = {0};
  const auto expect = [&](auto change, Code code, const char* words) {
    const Status status = adopt(change);
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code)) << status.text();
    EXPECT_THAT(status.text(), HasSubstr(words));
  };
  expect([](auto*, auto* l) { l->k.scheme = "int9"; }, Code::kFormat, "layer 5 K: scheme \"int9\"");
  expect([](auto*, auto* l) { l->k.scheme = "int4.token.g48"; }, Code::kFormat, "does not divide head_dim 64");
  expect([](auto*, auto* l) { l->k.scheme = "int4.token.g.center"; }, Code::kFormat, "mean is missing");
  expect([&](auto*, auto* l) { l->v.mean = mean; }, Code::kFormat, "mean is given");
  expect([&](auto*, auto* l) { l->v.basis = mean; }, Code::kFormat, "basis is given");
  expect([](auto*, auto* l) { l->v.scheme = "int4.token.g.lowrank8"; }, Code::kFormat, "basis_mean is missing; the scheme needs 128 values");
  const UnitConstants low_rank("int4.token.g.pre.lowrank32", 2, 64, 64);
  expect([&](auto*, auto* l) { l->k = low_rank.view(), l->k.basis = nullptr; }, Code::kFormat, "basis is missing; the scheme needs 4096 values");
  expect([&](auto*, auto* l) { l->k = low_rank.view(), l->k.chan_perm = "spread32"; }, Code::kFormat, "expected natural");
  expect([](auto*, auto* l) { l->v.chan_perm = "spread32"; }, Code::kFormat, "chan_perm");
  expect([](auto*, auto* l) { l->rotary_dim = 65; }, Code::kFormat, "rotary_dim is 65");
  expect([](auto*, auto* l) { l->softmax_scale = NAN; }, Code::kFormat, "softmax_scale");
  expect([](auto*, auto* l) { l->window_tokens = INT64_MAX; }, Code::kFormat, "window_tokens");
  expect([](auto* v, auto*) { v->page_tokens = 0; }, Code::kFormat, "page_tokens is 0");
  expect([](auto* v, auto*) { v->layers = nullptr; }, Code::kArgument, "layers is null");
  expect([](auto*, auto* l) { l->k.scheme = nullptr; }, Code::kArgument, "scheme is null");
  expect([](auto*, auto* l) { l->inv_freq = nullptr; }, Code::kArgument, "inv_freq is null");
}

TEST(Abi, MismatchOfHeads) {
  CacheShape shape;
  shape.first_head = 1, shape.n_heads = 2;
  const Cache cache(shape);
  EXPECT_EQ(cache.status().code(), Code::kMismatch);
  EXPECT_THAT(cache.status().text(), HasSubstr("layer 5 has 2 KV heads, limits ask for 1 + 2"));
}

TEST(Abi, Limits) {
  Cache cache{CacheShape()};
  const auto create = [&](auto change) {
    kvrt_limits limits = {};
    limits.max_batch = 1, limits.max_length = 16;
    change(&limits);
    ContextHandle context;
    PlanHandle plan;
    kvrt_layer_view layer = cache.layer_view();
    kvrt_plan_view view = {};
    view.n_layers = 1, view.layers = &layer, view.page_tokens = 64;
    EXPECT_TRUE(PlanHandle::adopt(view, &plan).ok());
    return ContextHandle::create(plan, limits, &context).code();
  };
  EXPECT_EQ(create([](kvrt_limits*) {}), Code::kOk);
  EXPECT_EQ(create([](kvrt_limits* l) { l->max_batch = 0; }), Code::kArgument);
  EXPECT_EQ(create([](kvrt_limits* l) { l->max_length = 0; }), Code::kArgument);
  EXPECT_EQ(create([](kvrt_limits* l) { l->max_q_len = 2; }), Code::kUnsupported);
  EXPECT_EQ(create([](kvrt_limits* l) { l->n_workers = -1; }), Code::kArgument);
  EXPECT_EQ(create([](kvrt_limits* l) { l->first_kv_head = 1; }), Code::kArgument);
}

TEST(Abi, Numeric) {
  CacheShape shape;
  shape.k = "int4.channel.g32.pre", shape.v = "fp8e4m3.token.g";
  for (const kvrt_side side : {KVRT_K, KVRT_V}) {
    Cache cache(shape);
    const std::vector<float> k = normal_rows(43, 120 * cache.row());
    ASSERT_TRUE(cache.append(120, k.data(), k.data()).ok());
    kvrt_verify_report report;
    ASSERT_TRUE(cache.verify(&report).ok());
    EXPECT_EQ(report.bad_scales + report.bad_values + report.bad_positions, 0);
    std::fill(cache.bytes(false, side).begin(), cache.bytes(false, side).end(), std::uint8_t{0xFF});
    const Status status = cache.verify(&report);
    EXPECT_EQ(status.code(), Code::kNumeric);
    EXPECT_THAT(status.text(), HasSubstr(side == KVRT_K ? "layer 5 K" : "layer 5 V"));
    EXPECT_GT(report.bad_values, 0);
    EXPECT_GT(report.bad_scales, 0);
    EXPECT_EQ(report.bad_positions > 0, side == KVRT_K);
  }
}

TEST(Abi, StatusNamesAndNullErrors) {
  EXPECT_STREQ(kvrt_status_name(KVRT_E_CAPACITY), "KVRT_E_CAPACITY");
  EXPECT_EQ(kvrt_plan_adopt(nullptr, nullptr, nullptr), KVRT_E_ARGUMENT);
  EXPECT_EQ(kvrt_plan_load(nullptr, nullptr, nullptr, nullptr), KVRT_E_ARGUMENT);
  EXPECT_EQ(kvrt_append(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), KVRT_E_ARGUMENT);
  EXPECT_EQ(kvrt_decode(nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), KVRT_E_ARGUMENT);
  EXPECT_EQ(kvrt_cache_bytes(nullptr, 0, KVRT_K, 1), -1);
  EXPECT_EQ(kvrt_workspace_bytes(nullptr), -1);
  kvrt_plan_release(nullptr);
  kvrt_context_destroy(nullptr);
}

TEST(Abi, CacheBytesAreThePagesOfASequence) {
  CacheShape shape;
  shape.k = "int4.channel.g64.pre";
  Cache cache(shape);
  for (const std::int64_t n : {5, 100, 101, 164, 500}) {
    std::int64_t pages[KVRT_SEGMENTS];
    ASSERT_EQ(kvrt_pages_needed(cache.context(), Cache::kLayer, n, pages, nullptr), KVRT_OK);
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      kvrt_layout exact, base;
      ASSERT_EQ(kvrt_page_layout(cache.context(), Cache::kLayer, side, KVRT_SINK, &exact, nullptr), KVRT_OK);
      ASSERT_EQ(kvrt_page_layout(cache.context(), Cache::kLayer, side, KVRT_BASE, &base, nullptr), KVRT_OK);
      EXPECT_EQ(kvrt_cache_bytes(cache.plan(), Cache::kLayer, side, n),
                (pages[KVRT_SINK] + pages[KVRT_WINDOW]) * exact.page_bytes + pages[KVRT_BASE] * base.page_bytes);
    }
  }
}

}  // namespace
}  // namespace kvrt::testing
