#pragma once
// kvrt.h for C++17: owning handles, a Status that cannot be ignored, a free list of pages, and pool memory for one layer. Header only.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/core/status.h"
#include "kernels/kvrt.h"

namespace kvrt {

/// Calls call(kvrt_error*) -> kvrt_status. Codes of kvrt.h and Code have the same order.
template <class Call>
Status checked(Call&& call) {
  kvrt_error err;
  const kvrt_status code = call(&err);
  return code == KVRT_OK ? Status() : Status(static_cast<Code>(code), err.text);
}

class PlanHandle {
 public:
  static Status load(const std::string& plan_json, PlanHandle* out, const char* plan_tensors = nullptr) {
    return checked([&](kvrt_error* err) {
      kvrt_plan* plan = nullptr;
      const kvrt_status code = kvrt_plan_load(plan_json.c_str(), plan_tensors, &plan, err);
      out->plan_.reset(plan);
      return code;
    });
  }
  static Status adopt(const kvrt_plan_view& view, PlanHandle* out) {
    return checked([&](kvrt_error* err) {
      kvrt_plan* plan = nullptr;
      const kvrt_status code = kvrt_plan_adopt(&view, &plan, err);
      out->plan_.reset(plan);
      return code;
    });
  }
  const kvrt_plan* get() const noexcept { return plan_.get(); }
  /// Its strings and arrays live as long as the plan. Requires: a loaded plan.
  kvrt_plan_view view() const {
    kvrt_plan_view v = {};
    kvrt_plan_describe(plan_.get(), &v, nullptr);
    return v;
  }

 private:
  struct Release {
    void operator()(kvrt_plan* p) const noexcept { kvrt_plan_release(p); }
  };
  std::unique_ptr<kvrt_plan, Release> plan_;
};

class ContextHandle {
 public:
  static Status create(const PlanHandle& plan, const kvrt_limits& limits, ContextHandle* out, const kvrt_device* device = nullptr) {
    return checked([&](kvrt_error* err) {
      kvrt_context* context = nullptr;
      const kvrt_status code = kvrt_context_create(plan.get(), device, &limits, &context, err);
      out->context_.reset(context);
      return code;
    });
  }
  const kvrt_context* get() const noexcept { return context_.get(); }

 private:
  struct Destroy {
    void operator()(kvrt_context* c) const noexcept { kvrt_context_destroy(c); }
  };
  std::unique_ptr<kvrt_context, Destroy> context_;
};

/// Ids 0 ... n - 1, handed out last-in first-out.
class PagePool {
 public:
  explicit PagePool(std::int32_t n_pages) {
    for (std::int32_t id = n_pages; id > 0; --id) free_.push_back(id - 1);
  }
  std::size_t n_free() const noexcept { return free_.size(); }
  /// Appends pages to `list` until it has n; kCapacity and no change if the pool does not hold enough.
  Status grow(std::vector<std::int32_t>* list, std::int64_t n) {
    const std::int64_t missing = n - static_cast<std::int64_t>(list->size());
    if (missing > static_cast<std::int64_t>(free_.size())) {
      return Status(Code::kCapacity, "page pool: " + std::to_string(missing) + " pages asked for, " + std::to_string(free_.size()) + " free");
    }
    for (std::int64_t i = 0; i < missing; ++i) list->push_back(free_.back()), free_.pop_back();
    return {};
  }
  void give_back(std::vector<std::int32_t>* list) {
    free_.insert(free_.end(), list->rbegin(), list->rend());
    list->clear();
  }

 private:
  std::vector<std::int32_t> free_;
};

/// Memory of one layer's pools on the host.
class PoolMemory {
 public:
  static Status allocate(const ContextHandle& context, std::int32_t layer, std::int64_t n_exact_pages, std::int64_t n_base_pages, PoolMemory* out) {
    return allocate(context.get(), layer, n_exact_pages, n_base_pages, out);
  }
  static Status allocate(const kvrt_context* context, std::int32_t layer, std::int64_t n_exact_pages, std::int64_t n_base_pages, PoolMemory* out) {
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      for (const bool exact : {true, false}) {
        kvrt_layout layout = {};
        if (Status status = checked([&](kvrt_error* err) {
              return kvrt_page_layout(context, layer, side, exact ? KVRT_WINDOW : KVRT_BASE, &layout, err);
            });
            !status.ok()) {
          return status;
        }
        const std::int64_t n = exact ? n_exact_pages : n_base_pages;
        std::vector<std::uint8_t>& bytes = out->bytes_[exact ? 0 : 1][side];
        bytes.assign(static_cast<std::size_t>(n * layout.page_bytes), 0xFF);
        (exact ? out->pools_.exact : out->pools_.base)[side] = {bytes.data(), layout.page_bytes, n};
      }
    }
    return {};
  }
  const kvrt_pools& pools() const noexcept { return pools_; }
  std::vector<std::uint8_t>& bytes(bool exact, kvrt_side side) { return bytes_[exact ? 0 : 1][side]; }

 private:
  std::vector<std::uint8_t> bytes_[2][KVRT_SIDES];
  kvrt_pools pools_ = {};
};

}  // namespace kvrt
