/* kvrt: storage and attention of a compressed KV cache, by the plan that kvplan writes. C99.
 *
 * Legend: H KV heads, G query heads per KV head (query head h reads KV head h / G), D head_dim, T tokens, P tokens of a page.
 * Memory of pages, page lists, inputs and outputs is the caller's. Strides are bytes. Every call that can fail returns a
 * kvrt_status and, if `err` is not NULL, writes one sentence: layer, side, got, expected. The library never prints, aborts or
 * throws, keeps no global state, and allocates in plan_load, plan_adopt, plan_check, plan_release and context_create/destroy only.
 * Plans and contexts are immutable and may be shared by threads; every other call is re-entrant with a workspace of its own.
 *
 * Backend cuda: pools, rows of q, k, v and out, sink_logit, lse, mass and workspaces are memory of the device; kvrt_batch, page lists and
 * the ids of copy_pages are host memory, read before the call returns. They reach the device as kernel arguments: append, decode, gather
 * and copy_pages allocate nothing, wait for nothing, keep nothing of the caller's, may overlap with workspaces of their own, and can be
 * captured in a graph, which then repeats that very step (lengths and pages as they were). The current device of the calling thread is
 * the context's. page_verify and monitor_read wait, and so does a gather that needs positions which only the pages know (keys before
 * RoPE, POST_ROPE, no row of the sequence in the batch). The first driver error stays: every later call on the context gives it again.
 *
 * Names that later versions use are laid out already and refused today with KVRT_E_UNSUPPORTED: the salient tier, several query
 * tokens a step, sliding windows, the schedule on the device, requant, the CUDA backend where it is not built. */
#ifndef KVRT_H
#define KVRT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---------------------------------------------------------------------------------------------------------------- */

typedef enum kvrt_status {
  KVRT_OK = 0,
  KVRT_E_ARGUMENT = 1,    /* null pointer, bad index, page id out of range, positions with gaps */
  KVRT_E_IO = 2,          /* a file that cannot be read */
  KVRT_E_FORMAT = 3,      /* a file or struct that breaks its schema */
  KVRT_E_MISMATCH = 4,    /* well formed, but of another model, head count or device */
  KVRT_E_UNSUPPORTED = 5, /* well formed, but this build has no code for it */
  KVRT_E_CAPACITY = 6,    /* workspace, pages or length beyond what was agreed */
  KVRT_E_CUDA = 7,        /* driver error; the text has its code. Every later call on the context fails with it */
  KVRT_E_NUMERIC = 8,     /* stored bytes that no encoder writes: NaN codes, bad scales */
  KVRT_E_INTERNAL = 9     /* out of memory, or a fault of this library */
} kvrt_status;

#define KVRT_ERROR_TEXT 512
typedef struct kvrt_error {
  kvrt_status status;
  char text[KVRT_ERROR_TEXT]; /* ends in 0; cut if longer */
} kvrt_error;

const char* kvrt_status_name(kvrt_status status); /* "KVRT_E_FORMAT" */
const char* kvrt_version(void);

/* ---- Words ----------------------------------------------------------------------------------------------------------------- */

typedef enum kvrt_side { KVRT_K = 0, KVRT_V = 1, KVRT_SIDES = 2 } kvrt_side;
/* Where a token is: the first S tokens stay in sink pages, the last ones in the window ring, all others in base pages. */
typedef enum kvrt_segment { KVRT_SINK = 0, KVRT_WINDOW = 1, KVRT_BASE = 2, KVRT_SALIENT = 3, KVRT_SEGMENTS = 4 } kvrt_segment;
typedef enum kvrt_dtype { KVRT_F32 = 0, KVRT_F16 = 1, KVRT_BF16 = 2 } kvrt_dtype;
/* Keys and queries before or after R_t = attention factor x rotation by the token's position; or as the unit stores them. */
typedef enum kvrt_frame { KVRT_POST_ROPE = 0, KVRT_PRE_ROPE = 1, KVRT_AS_STORED = 2 } kvrt_frame;
typedef enum kvrt_rope_style {
  KVRT_ROPE_NONE = 0,
  KVRT_ROPE_HALF_SPLIT = 1,  /* pairs (i, i + rotary_dim / 2) */
  KVRT_ROPE_INTERLEAVED = 2  /* pairs (2i, 2i + 1) */
} kvrt_rope_style;
typedef enum kvrt_backend { KVRT_BACKEND_DEFAULT = 0, KVRT_BACKEND_REF = 1, KVRT_BACKEND_CPU = 2, KVRT_BACKEND_CUDA = 3 } kvrt_backend;

/* ---- Plans ----------------------------------------------------------------------------------------------------------------- */

typedef struct kvrt_plan kvrt_plan;

/* How one side of a layer is stored. Arrays are NULL where the scheme does not ask for them (kernels/core/plan_constants.h). */
typedef struct kvrt_unit_view {
  const char* scheme;      /* "int4.channel.g64.pre" */
  const char* chan_perm;   /* keys: stored channel order, "natural" (or NULL) or "spread<N>" */
  const char* block_order; /* keys in llama.cpp's blocks: "half_split" (or NULL) or "adjacent" pairs */
  const float* mean;       /* center: [H, D] */
  const float* smooth;     /* smooth: [H, D], > 0 */
  const float* clip_lo;    /* static thresholds: tensor [1], head [H], channel.static [H, D] */
  const float* clip_hi;    /* the same; fp8 and nvfp4: the largest magnitude to cover */
  const float* clip_alpha; /* clip over token and channel groups: [1] in (0, 1], share of a range that is left, about its mean */
  const float* codebook;   /* nuq: [2^bits] ascending */
  const float* ef_u;       /* ef: [H, D (D + 1) / 2] upper triangles by rows, in the order of ef_order */
  const int32_t* ef_order; /* ef: [H, D] channels in the order of feedback */
  const float* basis_mean; /* lowrank<r>: [H, D] mean row */
  const float* basis_in;   /* lowrank<r>: [H, D, r], coefficients = (row - basis_mean) basis_in */
  const float* basis;      /* lowrank<r>: [H, r, D], row = basis_mean + coefficients basis */
} kvrt_unit_view;

typedef struct kvrt_layer_view {
  int32_t index;           /* of the layer in the model; ascending, layers without KV of their own are left out */
  int32_t n_q_heads, n_kv_heads, head_dim;
  int32_t rotary_dim;      /* rotated channels, the first ones of a head; 0 with KVRT_ROPE_NONE */
  kvrt_rope_style rope_style;
  double attention_factor; /* on cosine and sine (YaRN); 1 otherwise */
  const double* inv_freq;  /* [rotary_dim / 2] */
  double softmax_scale;    /* of q.k, both after R_t */
  int64_t sliding_window;  /* 0 = none */
  int64_t sink_tokens, window_tokens;
  double salient_fraction;
  kvrt_unit_view k, v;
} kvrt_layer_view;

typedef struct kvrt_plan_view {
  const char* architecture;    /* may be NULL, like the next two */
  const char* model_name;
  const char* weights_sha256;
  int32_t n_layers;            /* entries of `layers` */
  const kvrt_layer_view* layers;
  int32_t page_tokens;         /* 32, 64 or 128 */
  int64_t scale_refresh_tokens;
} kvrt_plan_view;

/* plan_tensors: the .safetensors file beside the plan; NULL = the file that the plan names, in the plan's folder. */
kvrt_status kvrt_plan_load(const char* plan_json, const char* plan_tensors, kvrt_plan** out, kvrt_error* err);
/* The same from structs; everything is copied. */
kvrt_status kvrt_plan_adopt(const kvrt_plan_view* view, kvrt_plan** out, kvrt_error* err);
void kvrt_plan_release(kvrt_plan* plan);

/* The plan's own storage, valid as long as the plan. */
kvrt_status kvrt_plan_describe(const kvrt_plan* plan, kvrt_plan_view* out, kvrt_error* err);
/* KVRT_E_MISMATCH unless the plan was made for this model. Fields that are NULL or have n_layers 0 are not compared; of the
 * layers, index, heads, head_dim, rotary_dim, rope_style and inv_freq (to 1e-6) are. */
kvrt_status kvrt_plan_check_model(const kvrt_plan* plan, const kvrt_plan_view* model, kvrt_error* err);

typedef enum kvrt_path { KVRT_PATH_MISSING = 0, KVRT_PATH_FUSED = 1, KVRT_PATH_TWO_PASS = 2, KVRT_PATH_JIT = 3 } kvrt_path;
typedef struct kvrt_device {
  kvrt_backend backend; /* DEFAULT: cpu; cuda works on other memory and is taken only by name. KVRT_FORCE_BACKEND = ref, cpu or cuda goes before it. */
  int32_t index;        /* of the GPU */
} kvrt_device;
typedef struct kvrt_unit_report {
  int32_t layer;
  kvrt_side side;
  const char* scheme;
  kvrt_path path;
  kvrt_backend backend;
  const char* reason;   /* "" or why the unit is missing */
  const char* nearest;  /* for a missing unit: a scheme that this device runs in its place; "" if none does */
} kvrt_unit_report;
typedef void (*kvrt_unit_report_fn)(void* user, const kvrt_unit_report* report);
/* One report for each layer and side, before any cache memory is asked for. KVRT_E_UNSUPPORTED if a unit is missing; `err` names
 * the first. */
kvrt_status kvrt_plan_check(const kvrt_plan* plan, const kvrt_device* device, kvrt_unit_report_fn report, void* user, kvrt_error* err);

/* ---- Contexts -------------------------------------------------------------------------------------------------------------- */

typedef struct kvrt_context kvrt_context;

/* Runs body(arg, i, worker) for every i in [0, n), in any order, worker < n_workers unique among the calls that run at once. */
typedef void (*kvrt_parallel_for)(void* user, int64_t n, void (*body)(void* arg, int64_t i, int32_t worker), void* arg);

typedef struct kvrt_limits {
  int32_t max_batch;      /* sequences of one call */
  int64_t max_length;     /* tokens of one sequence, and its largest position + 1 */
  int32_t max_q_len;      /* query tokens of one sequence and step; 1 (0 = 1) */
  int32_t first_kv_head;  /* the context's share of every layer's heads ... */
  int32_t n_kv_heads;     /* ... 0 = all */
  int32_t accept_two_pass, accept_jit; /* slower paths are taken only if asked for */
  int32_t n_workers;      /* 0 = 1 */
  kvrt_parallel_for parallel_for;      /* NULL = the caller's thread alone. Results do not depend on it. */
  void* parallel_user;
} kvrt_limits;

kvrt_status kvrt_context_create(const kvrt_plan* plan, const kvrt_device* device, const kvrt_limits* limits, kvrt_context** out,
                                kvrt_error* err); /* device NULL = default */
void kvrt_context_destroy(kvrt_context* context);

/* "layer 3: cpu, K int4.channel.g64.pre, V int4.token.g64, decode fused"; NULL for a layer without KV. */
const char* kvrt_describe(const kvrt_context* context, int32_t layer);

/* ---- Sizes ----------------------------------------------------------------------------------------------------------------- */

/* A page is [header][H blocks]; a block [codes][params][...], padded to 128 bytes. Sink and window share exact pages of 16 tokens
 * in bf16. */
typedef struct kvrt_layout {
  int32_t page_tokens;
  int64_t page_bytes, header_bytes, block_bytes;
  int64_t codes_bytes, params_bytes; /* of a block, at offsets 0 and codes_bytes */
} kvrt_layout;
kvrt_status kvrt_page_layout(const kvrt_context* context, int32_t layer, kvrt_side side, kvrt_segment segment, kvrt_layout* out,
                             kvrt_error* err);
/* Bytes of all pages of one sequence of n_tokens, all heads: what the plan's effective bits count. -1 for bad arguments. */
int64_t kvrt_cache_bytes(const kvrt_plan* plan, int32_t layer, kvrt_side side, int64_t n_tokens);
/* Pages of one sequence of n_tokens, the same for K and V. Window pages are a ring and asked for as a whole. */
kvrt_status kvrt_pages_needed(const kvrt_context* context, int32_t layer, int64_t n_tokens, int64_t n_pages[KVRT_SEGMENTS],
                              kvrt_error* err);
/* Enough for any call on this context. */
int64_t kvrt_workspace_bytes(const kvrt_context* context);

/* ---- Steps ----------------------------------------------------------------------------------------------------------------- */

/* Page ids of all sequences: those of sequence s are pages[offsets[s]] ... pages[offsets[s + 1] - 1], in order of tokens.
 * Both NULL = no pages. */
typedef struct kvrt_page_list {
  const int32_t* pages;
  const int64_t* offsets; /* [n_seqs + 1] */
} kvrt_page_list;

/* One step of a continuous batch: row r of inputs and outputs belongs to the sequence s with row_offsets[s] <= r < row_offsets[s + 1].
 * Row i of a sequence is its token seq_len[s] + i. append and decode of one step take the same batch. */
typedef struct kvrt_batch {
  int32_t n_seqs;
  const int64_t* seq_len;     /* [n_seqs] tokens in the cache before this step */
  const int64_t* row_offsets; /* [n_seqs + 1] */
  const int64_t* positions;   /* [rows] consecutive within a sequence, and equal to its first position + token; negative: no token
                                 (padding, after the tokens of its sequence). Calls have no memory of a sequence: a first position
                                 that differs from that of earlier steps is seen by page_verify alone, and only where pages carry
                                 positions (keys before RoPE) */
  kvrt_page_list pages[KVRT_SEGMENTS];
  const uint8_t* sink_flags;  /* later versions; NULL */
} kvrt_batch;

/* Page p starts at base + p * page_stride. Page p holds the same tokens on both sides. */
typedef struct kvrt_pool {
  void* base;
  int64_t page_stride; /* 0 = page_bytes of the layout */
  int64_t n_pages;
} kvrt_pool;
typedef struct kvrt_pools {
  kvrt_pool exact[KVRT_SIDES]; /* sink and window */
  kvrt_pool base[KVRT_SIDES];
  kvrt_pool salient[KVRT_SIDES]; /* later versions; zero */
} kvrt_pools;

/* [rows, H, D]; stride 0 = dense. D is contiguous. */
typedef struct kvrt_rows {
  const void* data;
  kvrt_dtype dtype;
  int64_t row_stride, head_stride;
} kvrt_rows;
typedef struct kvrt_rows_out {
  void* data;
  kvrt_dtype dtype;
  int64_t row_stride, head_stride;
} kvrt_rows_out;

typedef struct kvrt_qkv {
  kvrt_rows k, v;
  kvrt_frame k_frame; /* PRE_ROPE: the library rotates where a layer stores rotated keys. POST_ROPE: already rotated; layers that
                         store keys before RoPE refuse it. */
} kvrt_qkv;

typedef struct kvrt_workspace {
  void* data;
  int64_t bytes;
} kvrt_workspace;

/* Writes the tokens of a step: exact pages first; what leaves the window is encoded once, into base pages. Any number of tokens a
 * sequence, with the same bytes as one by one. Tokens with non-finite values are stored with 0 in their place and counted. */
kvrt_status kvrt_append(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_qkv* qkv, const kvrt_pools* pools,
                        const kvrt_workspace* workspace, void* stream, kvrt_error* err);

typedef struct kvrt_attn {
  kvrt_rows q;               /* [rows, G H, D] */
  kvrt_frame q_frame;        /* PRE_ROPE: rotated by the row's position here */
  double softmax_scale;      /* 0 = the plan's */
  double soft_cap;           /* 0 = none; else score = cap * tanh(score / cap) */
  const float* sink_logit;   /* [G H] learned logit of a column without value, natural units; NULL = none */
  int64_t sliding_window;    /* later versions; 0 */
  kvrt_rows_out out;         /* [rows, G H, D] */
  float* lse;                /* [rows, G H] natural log of the denominator, NULL = not asked for */
  float* mass;               /* [rows, G H, KVRT_SEGMENTS] share of the softmax in each segment, NULL = not asked for */
} kvrt_attn;

/* Attention of each sequence's one query token over all its tokens, the token itself included: append comes first. Sequences
 * without rows and rows without token are left alone. */
kvrt_status kvrt_decode(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_attn* attn, const kvrt_pools* pools,
                        const kvrt_workspace* workspace, void* stream, kvrt_error* err);

/* Stored tokens [first_token, first_token + n_tokens) of one sequence of the batch, after the step's append, in order of tokens. */
typedef struct kvrt_gather_args {
  int32_t seq;
  kvrt_side side;
  kvrt_frame frame; /* of keys: POST_ROPE or AS_STORED */
  int64_t first_token, n_tokens;
  kvrt_rows_out out; /* [n_tokens, H, D] */
} kvrt_gather_args;
kvrt_status kvrt_gather(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_gather_args* args,
                        const kvrt_pools* pools, const kvrt_workspace* workspace, void* stream, kvrt_error* err);

/* Copies pages from[i] to to[i] on both sides: shared prefixes, forks of the exact pages. */
kvrt_status kvrt_copy_pages(const kvrt_context* context, int32_t layer, kvrt_segment segment, const kvrt_pools* pools, const int32_t* from,
                            const int32_t* to, int64_t n, void* stream, kvrt_error* err);

typedef struct kvrt_verify_report {
  int64_t n_tokens;          /* looked at, both sides */
  int64_t bad_values;        /* NaN or infinite after decoding */
  int64_t bad_scales;        /* tokens or groups with a scale that no encoder writes */
  int64_t bad_positions;     /* page headers that do not belong to this sequence */
  uint64_t checksum;         /* of decoded values in order of tokens, K then V: equal for equal content, wherever the pages are */
} kvrt_verify_report;
/* Looks at every live byte of one sequence. KVRT_E_NUMERIC if anything is bad. */
kvrt_status kvrt_page_verify(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, int32_t seq, const kvrt_pools* pools,
                             const kvrt_workspace* workspace, kvrt_verify_report* out, void* stream, kvrt_error* err);

/* decode(encode(x)) by the unit's scheme and constants: bit for bit what gather gives AS_STORED for base tokens. x, out: fp32
 * [n_tokens, H, D] in the unit's frame; channel.g<N>: n_tokens is a multiple of N.
 * Backend cuda: x, out are memory of the device, the work is in the null stream; with outliers of channel groups the call allocates and
 * waits. */
kvrt_status kvrt_fake_quant(const kvrt_context* context, int32_t layer, kvrt_side side, int64_t n_tokens, const float* x, float* out,
                            kvrt_error* err);

/* What encoders met since the context was created, per layer and side. May synchronise with a device. */
typedef struct kvrt_health {
  int64_t tokens;            /* x heads, encoded into base pages */
  int64_t non_finite;        /* values stored as 0 */
  int64_t saturated;         /* values or parameters beyond their range */
  int64_t floored;           /* groups so flat that the scale is at its floor */
} kvrt_health;
kvrt_status kvrt_monitor_read(const kvrt_context* context, int32_t layer, kvrt_side side, kvrt_health* out, kvrt_error* err);

/* Later versions: always KVRT_E_UNSUPPORTED. */
kvrt_status kvrt_schedule(const kvrt_context* context, const kvrt_batch* batch, const kvrt_workspace* workspace, void* stream, kvrt_error* err);
kvrt_status kvrt_requant(const kvrt_context* context, int32_t layer, const kvrt_batch* batch, const kvrt_pools* pools, void* stream,
                         kvrt_error* err);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif
