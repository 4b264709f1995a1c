#pragma once
// A plan on a device within limits: everything that append and decode need, resolved when the context is created. Immutable but for
// the health counters.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/codec/page_codec.h"
#include "kernels/codec/rope.h"
#include "kernels/core/cuda_paths.h"
#include "kernels/core/device_layer.h"
#include "kernels/core/plan.h"
#include "kernels/read/decode_cpu.h"
#include "kernels/write/fake_quant_job.h"
#include "kernels/write/write_path.h"

namespace kvrt {

inline constexpr std::int64_t kWorkspaceAlign = 256;  ///< of the parts of a workspace; workspaces start anywhere

/// Counters of one layer and side; see kvrt_health.
struct Health {
  std::atomic<std::int64_t> tokens{0}, non_finite{0}, saturated{0}, floored{0};
  void add(std::int64_t n_tokens, const EncodeCounters& c) {
    tokens.fetch_add(n_tokens, std::memory_order_relaxed);
    non_finite.fetch_add(c.non_finite, std::memory_order_relaxed);
    saturated.fetch_add(c.saturated, std::memory_order_relaxed);
    floored.fetch_add(c.floored, std::memory_order_relaxed);
  }
};

/// One side of a layer, its heads counted from 0 in the context's share.
struct UnitContext {
  std::string name;                       ///< "layer 3 K int4.token.g32"
  bool pre = false;                       ///< keys before RoPE: pages carry positions
  FakeQuantArgs args;                     ///< scheme, shape and constants; x, out and n_tokens unset
  FakeQuantJob job;                       ///< the same, resolved
  std::vector<std::int32_t> block_order;  ///< llama.cpp blocks of keys, else empty
  std::vector<StaticRange> channel_ranges;  ///< channel.static: [H, D]
  std::vector<float> stored_mean;         ///< center: [H, D] what `mean` is in the coordinates and order of stored rows
  std::vector<PageCodec> codecs;          ///< [H] of base pages
  PageCodec exact;                        ///< of sink and window pages
  BlockLayout base_page, exact_page;
};

struct LayerContext {
  const LayerPlan* plan = nullptr;
  LayerLayout layout;                     ///< n_kv_heads: those of the context
  int group = 1;                          ///< G
  RopeTables rope;
  std::int64_t n_coarse = 0;              ///< rows of its coarse table
  std::vector<float> rope_tile;           ///< of the cpu backend, see decode_cpu.h
  std::vector<std::int32_t> pair_places;  ///< the same: [n_pairs, 2] where base keys hold a pair, empty in natural order
  UnitContext units[KVRT_SIDES];
  CudaPath cuda;                          ///< of the cuda backend: kernels of decode
  const DeviceLayer* on_device = nullptr; ///< the same: this layer in device memory
  std::string description;

  const Tiers& tiers() const { return layout.tiers; }
};

/// Tables of the layers with one rope.
struct RopeStorage {
  const LayerPlan* first = nullptr;
  std::vector<float> coarse, fine;
};

/// The first driver error of a context. Written once; every call after it fails with it.
class DriverError {
 public:
  void keep(const std::string& text);
  /// Null without an error.
  const char* text() const { return state_.load(std::memory_order_acquire) == kWritten ? text_ : nullptr; }

 private:
  enum State { kNone, kWriting, kWritten };
  std::atomic<int> state_{kNone};
  char text_[KVRT_ERROR_TEXT] = {};
};

class DeviceTables;

/// What a context must be able to do. Tests of storage alone take formats that decode has no kernel for.
enum class Needs { kStorage, kAll };

class Context {
 public:
  Context();
  ~Context();
  /// Codes: kArgument (limits), kUnsupported (a unit that this build does not run, a backend it does not have).
  static Status make(const Plan& plan, const kvrt_device& device, const kvrt_limits& limits, Context* out, Needs needs = Needs::kAll);

  /// Null for a layer without KV.
  const LayerContext* find(int layer) const;
  Health& health(const LayerContext& layer, kvrt_side side) const;
  /// What the host counted, and what a device did, for which this waits.
  Status read_health(const LayerContext& layer, kvrt_side side, kvrt_health* out) const;

  const kvrt_limits& limits() const { return limits_; }
  kvrt_backend backend() const { return backend_; }
  DriverError& driver_error() const { return *driver_error_; }
  int n_processors() const { return n_processors_; }         ///< of the cuda backend
  int device() const { return device_.index; }
  AttendHead attend() const { return decode_path_.attend; }  ///< of the cpu backend
  /// Null where the reference appends: on its backend, and where vectors do not divide a row.
  const WritePath* write_path(const LayerContext& layer) const;
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  /// The part of a workspace that one worker uses; behind all workers' parts comes the shared one. Workspaces start anywhere.
  std::int64_t worker_bytes() const { return worker_bytes_; }

 private:
  Status add_layer(const LayerPlan& plan, Needs needs, LayerContext* layer);
  Status add_device();
  Status add_unit(const LayerPlan& plan, kvrt_side side, LayerContext* layer);
  void add_rope(const LayerPlan& plan, LayerContext* layer);

  std::unique_ptr<Plan> plan_;
  kvrt_limits limits_ = {};
  kvrt_backend backend_ = KVRT_BACKEND_REF;
  DecodeBackend decode_path_ = {};
  WritePath write_path_ = {};
  std::vector<LayerContext> layers_;
  std::vector<std::unique_ptr<RopeStorage>> ropes_;
  std::unique_ptr<Health[]> health_;
  kvrt_device device_ = {};
  int n_processors_ = 0;
  std::unique_ptr<DeviceTables> tables_;
  std::unique_ptr<DriverError> driver_error_;
  std::int64_t worker_bytes_ = 0, shared_bytes_ = 0, workspace_bytes_ = 0;
};

/// The backend that a device asks for, after KVRT_FORCE_BACKEND. kUnsupported names what this build has.
Status choose_backend(const kvrt_device& device, kvrt_backend* out);
const char* backend_name(kvrt_backend backend);

/// Runs body(i, worker) for every i in [0, n).
template <class Body>
void for_each(const kvrt_limits& limits, std::int64_t n, Body&& body) {
  if (!limits.parallel_for || n < 2) {
    for (std::int64_t i = 0; i < n; ++i) body(i, std::int32_t{0});
    return;
  }
  limits.parallel_for(limits.parallel_user, n, [](void* arg, std::int64_t i, std::int32_t worker) { (*static_cast<Body*>(arg))(i, worker); }, &body);
}

}  // namespace kvrt

/// Behind the C handle.
struct kvrt_context {
  kvrt::Context context;
};
