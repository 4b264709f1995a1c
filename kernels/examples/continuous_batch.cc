// A continuous batch over paged pools: sequences of different lengths join, grow by one token a step, finish, and their pages go to
// those that follow. usage: continuous_batch plan.json
// The model is a stand-in: keys, values and queries are a fixed function of (sequence, layer, token). At the end every sequence is
// decoded once more alone, in pools of its own, and must give the same attention outputs.

#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

#include "kernels/kvrt.hpp"

namespace {

using kvrt::Status;

struct Request {
  int id;
  std::int64_t prompt, total;  ///< tokens: given at once, and when the sequence ends
};
constexpr int kMaxBatch = 3;
constexpr std::int64_t kMaxLength = 512;

float wave(std::int64_t a, std::int64_t b, std::int64_t c) {
  return static_cast<float>(std::sin(static_cast<double>((a * 7919 + b * 104729 + c) % 65521) * 12.9898));
}

/// Page lists of one sequence. Every layer has pools of its own, so one list serves all layers.
struct Sequence {
  Request request{};
  std::int64_t length = 0;
  std::vector<std::int32_t> pages[KVRT_SEGMENTS];
  float last = 0;  ///< first output of the last step, all layers added
};

class Runtime {
 public:
  /// n_exact, n_base: pages of every layer's pools.
  Status open(const kvrt::PlanHandle& plan, std::int32_t n_exact, std::int32_t n_base) {
    view_ = plan.view();
    kvrt_limits limits = {};
    limits.max_batch = kMaxBatch, limits.max_length = kMaxLength;
    if (Status s = kvrt::ContextHandle::create(plan, limits, &context_); !s.ok()) return s;
    memory_.resize(static_cast<std::size_t>(view_.n_layers));
    for (std::size_t l = 0; l < memory_.size(); ++l) {
      if (Status s = kvrt::PoolMemory::allocate(context_, view_.layers[l].index, n_exact, n_base, &memory_[l]); !s.ok()) return s;
    }
    exact_ = kvrt::PagePool(n_exact), base_ = kvrt::PagePool(n_base);
    workspace_.resize(static_cast<std::size_t>(kvrt_workspace_bytes(context_.get())));
    return {};
  }

  /// One step: sequence s gets n_new[s] tokens; those with one new token are decoded.
  Status step(const std::vector<Sequence*>& batch, const std::vector<std::int64_t>& n_new) {
    for (std::size_t s = 0; s < batch.size(); ++s) {
      if (Status status = reserve(batch[s], batch[s]->length + n_new[s]); !status.ok()) return status;
      batch[s]->last = 0;
    }
    for (int l = 0; l < view_.n_layers; ++l) {
      if (Status status = run_layer(l, batch, n_new); !status.ok()) return status;
    }
    for (std::size_t s = 0; s < batch.size(); ++s) batch[s]->length += n_new[s];
    return {};
  }

  void release(Sequence* s) {
    for (const kvrt_segment segment : {KVRT_SINK, KVRT_WINDOW}) exact_.give_back(&s->pages[segment]);
    base_.give_back(&s->pages[KVRT_BASE]);
  }
  std::size_t n_free() const { return exact_.n_free() + base_.n_free(); }

 private:
  /// Enough pages of each kind for the layer that needs the most.
  Status reserve(Sequence* s, std::int64_t length) {
    std::int64_t most[KVRT_SEGMENTS] = {};
    for (int l = 0; l < view_.n_layers; ++l) {
      std::int64_t n[KVRT_SEGMENTS];
      if (Status status = kvrt::checked([&](kvrt_error* err) { return kvrt_pages_needed(context_.get(), view_.layers[l].index, length, n, err); }); !status.ok()) {
        return status;
      }
      for (int i = 0; i < KVRT_SEGMENTS; ++i) most[i] = n[i] > most[i] ? n[i] : most[i];
    }
    for (const kvrt_segment segment : {KVRT_SINK, KVRT_WINDOW, KVRT_BASE}) {
      if (Status status = (segment == KVRT_BASE ? base_ : exact_).grow(&s->pages[segment], most[segment]); !status.ok()) return status;
    }
    return {};
  }

  Status run_layer(int l, const std::vector<Sequence*>& batch, const std::vector<std::int64_t>& n_new) {
    const kvrt_layer_view& shape = view_.layers[l];
    const std::int64_t row = std::int64_t{shape.n_kv_heads} * shape.head_dim, q_row = std::int64_t{shape.n_q_heads} * shape.head_dim;
    std::vector<std::int64_t> lengths, rows{0}, positions;
    std::vector<std::int32_t> ids[KVRT_SEGMENTS];
    std::vector<std::int64_t> offsets[KVRT_SEGMENTS];
    std::vector<float> k, v, q;
    for (auto& o : offsets) o.push_back(0);
    for (std::size_t s = 0; s < batch.size(); ++s) {
      const Sequence& sequence = *batch[s];
      lengths.push_back(sequence.length);
      for (std::int64_t t = sequence.length; t < sequence.length + n_new[s]; ++t) {
        positions.push_back(t);
        const std::int64_t seed = sequence.request.id * 4096 + l;
        for (std::int64_t i = 0; i < row; ++i) k.push_back(wave(seed, t, i)), v.push_back(wave(seed + 1024, t, i));
        for (std::int64_t i = 0; i < q_row; ++i) q.push_back(wave(seed + 2048, t, i));
      }
      rows.push_back(static_cast<std::int64_t>(positions.size()));
      for (int i = 0; i < KVRT_SEGMENTS; ++i) {
        ids[i].insert(ids[i].end(), sequence.pages[i].begin(), sequence.pages[i].end());
        offsets[i].push_back(static_cast<std::int64_t>(ids[i].size()));
      }
    }
    kvrt_batch b = {};
    b.n_seqs = static_cast<std::int32_t>(batch.size());
    b.seq_len = lengths.data(), b.row_offsets = rows.data(), b.positions = positions.data();
    for (const kvrt_segment i : {KVRT_SINK, KVRT_WINDOW, KVRT_BASE}) b.pages[i] = {ids[i].data(), offsets[i].data()};
    kvrt_qkv qkv = {};
    qkv.k.data = k.data(), qkv.v.data = v.data(), qkv.k_frame = KVRT_PRE_ROPE;
    const kvrt_pools& pools = memory_[static_cast<std::size_t>(l)].pools();
    const kvrt_workspace workspace = {workspace_.data(), static_cast<std::int64_t>(workspace_.size())};
    if (Status status = kvrt::checked([&](kvrt_error* err) {
          return kvrt_append(context_.get(), shape.index, &b, &qkv, &pools, &workspace, nullptr, err);
        });
        !status.ok()) {
      return status;
    }
    // Prompts of several tokens attend by the model's own prefill attention; they take no part in decode.
    for (std::size_t s = 0; s < batch.size(); ++s) {
      if (n_new[s] == 1) continue;
      for (std::int64_t r = rows[s]; r < rows[s + 1]; ++r) positions[static_cast<std::size_t>(r)] = -1;
      lengths[s] += n_new[s];
    }
    std::vector<float> out(q.size());
    kvrt_attn attn = {};
    attn.q.data = q.data(), attn.q_frame = KVRT_PRE_ROPE, attn.out.data = out.data();
    if (Status status = kvrt::checked([&](kvrt_error* err) {
          return kvrt_decode(context_.get(), shape.index, &b, &attn, &pools, &workspace, nullptr, err);
        });
        !status.ok()) {
      return status;
    }
    for (std::size_t s = 0; s < batch.size(); ++s) {
      if (n_new[s] == 1) batch[s]->last += out[static_cast<std::size_t>(rows[s] * q_row)];
    }
    return {};
  }

  kvrt_plan_view view_ = {};
  kvrt::ContextHandle context_;
  std::vector<kvrt::PoolMemory> memory_;
  kvrt::PagePool exact_{0}, base_{0};
  std::vector<std::uint8_t> workspace_;
};

/// Serves all requests, at most kMaxBatch at a time; results by request id.
Status serve(const kvrt::PlanHandle& plan, std::deque<Request> waiting, std::int32_t n_exact, std::int32_t n_base, std::vector<float>* results) {
  Runtime runtime;
  if (Status s = runtime.open(plan, n_exact, n_base); !s.ok()) return s;
  const std::size_t n_free = runtime.n_free();
  std::vector<Sequence> running;
  while (!waiting.empty() || !running.empty()) {
    while (!waiting.empty() && running.size() < kMaxBatch) {
      running.emplace_back();
      running.back().request = waiting.front();
      waiting.pop_front();
    }
    std::vector<Sequence*> batch;
    std::vector<std::int64_t> n_new;
    for (Sequence& s : running) batch.push_back(&s), n_new.push_back(s.length == 0 ? s.request.prompt : 1);
    if (Status s = runtime.step(batch, n_new); !s.ok()) return s;
    for (std::size_t i = running.size(); i > 0; --i) {
      Sequence& s = running[i - 1];
      if (s.length < s.request.total) continue;
      (*results)[static_cast<std::size_t>(s.request.id)] = s.last;
      runtime.release(&s);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i - 1));
    }
  }
  return runtime.n_free() == n_free ? Status() : Status(kvrt::Code::kInternal, "pages were lost");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: continuous_batch plan.json\n"), 2;
  const std::deque<Request> requests = {{0, 40, 230}, {1, 200, 260}, {2, 1, 12}, {3, 90, 300}, {4, 7, 160}};
  constexpr std::int32_t kExact = 60, kBase = 16;
  kvrt::PlanHandle plan;
  std::vector<float> together(requests.size()), alone(requests.size());
  Status status = kvrt::PlanHandle::load(argv[1], &plan);
  if (status.ok()) status = serve(plan, requests, kExact, kBase, &together);
  for (const Request& r : requests) {
    if (status.ok()) status = serve(plan, {r}, kExact, kBase, &alone);
  }
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.text().c_str()), 1;
  for (const Request& r : requests) {
    const std::size_t i = static_cast<std::size_t>(r.id);
    std::printf("request %d: %lld tokens, output %.6f\n", r.id, static_cast<long long>(r.total), static_cast<double>(together[i]));
    if (together[i] != alone[i]) return std::fprintf(stderr, "request %d alone gives %.9g\n", r.id, static_cast<double>(alone[i])), 1;
  }
  std::printf("batch and single runs agree\n");
  return 0;
}
