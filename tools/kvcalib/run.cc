#include "tools/kvcalib/run.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/kv_tap.h"
#include "libcalib/model/streaming_runner.h"
#include "tools/common/option_values.h"
#include "tools/common/process_memory.h"
#include "tools/common/progress.h"

namespace calib::tools {
namespace {

/// Bytes that a channel's moments, extrema and quantile sketch take in memory (measured on trained models).
constexpr double kStatisticBytesPerChannel = 16e3;
/// The same in the file: fixed fields, and a compressed sketch that grows with the logarithm of the tokens.
double file_bytes_per_channel(std::int64_t n_tokens) {
  return 280.0 + std::max(150.0, 155.0 * (std::log2(static_cast<double>(std::max<std::int64_t>(1, n_tokens))) - 8.8));
}
/// What the HDF5 library keeps for each layer written, up to the limit of its cache.
constexpr double kFileCachePerLayer = 1.2 * 1048576, kFileCacheLimit = 32 * 1048576;

struct Totals {
  std::int64_t n_distinct = 0;
  double commonest_share = 0;
};

Totals token_diversity(const std::vector<text::Document>& documents) {
  std::unordered_map<text::TokenId, std::int64_t> counts;
  std::int64_t total = 0, largest = 0;
  for (const auto& document : documents)
    for (const text::TokenId id : document.ids) largest = std::max(largest, ++counts[id]), ++total;
  return {static_cast<std::int64_t>(counts.size()), total ? static_cast<double>(largest) / static_cast<double>(total) : 0.0};
}

class Run {
 public:
  Run(const KvcalibOptions& options, const Invocation& call)
      : options_(options), call_(call), progress_(call.verbosity), pool_(call.n_threads()) {
    log_.note = [this](const std::string& text) { progress_.note(text); };
    log_.warning = [this](const std::string& text) {
      progress_.warning(text);
      summary_.warnings.push_back(to_valid_utf8(text));
    };
  }

  int run() {
    const bool with_statistics = options_.statistics == "all";
    if (with_statistics) check_output(options_.output, inputs_of(options_.run), kStatsOutput);
    model::StreamingModel opened = model::StreamingModel::open(options_.run.model, model_options(options_.run, call_), log_);
    model_ = &opened;
    // Kept in the file beside the warnings, so that a value nobody stated can be told from one that was.
    if (!opened.defaults_used().empty())
      summary_.warnings.push_back(fmt::format("defaults used for absent keys: {}", fmt::join(opened.defaults_used(), ", ")));
    const auto tokenizer = opened.load_tokenizer(log_);
    corpus_ = text::load_corpus(corpus_request(options_.run, opened.identity().max_positions), *tokenizer, log_);
    if (corpus_.longest() <= options_.n_sinks)
      fail(ErrorKind::kInfeasible, "--data", "the longest document has {}, and the first {} are sinks, which count apart: nothing is left to "
           "measure; give more text, a larger --seq-len, or fewer --sinks", counted(corpus_.longest(), "token"), options_.n_sinks);
    header_.model = opened.identity();
    header_.model.tokenizer_sha256 = tokenizer->sha256();
    header_.data = corpus_.identity;
    header_.n_sinks = options_.n_sinks;
    header_.rows_per_document = options_.attention_rows;
    header_.provenance = {"kvcalib", version(), call_.argv, call_.started_utc, 0.0, static_cast<std::uint64_t>(options_.run.seed),
                          opened.device(), opened.dtype(), {}};
    runner_.hidden_memory_bytes = options_.run.hidden_mem;
    runner_.seed = static_cast<std::uint64_t>(options_.run.seed);
    runner_.attention_rows = options_.attention_rows;
    if (options_.run.dry_run) return dry_run();
    say_what_runs();
    warn_about_text();
    return with_statistics ? calibrate() : bare_forward();
  }

 private:
  void say_what_runs() {
    const auto& m = header_.model;
    progress_.say(fmt::format("{}: {}, {}, {} query and {} of {}; {}, {}; {} on {}, {}", m.name, m.architecture, counted(m.n_layers, "layer"),
                              m.layers[0].n_q_heads, counted(m.layers[0].n_kv_heads, "KV head"), m.layers[0].head_dim,
                              counted(header_.data.n_documents, "document"), counted(header_.data.n_tokens, "token"), model_->dtype(), model_->device(),
                              counted(call_.n_threads(), "thread")));
    if (!model_->has_head()) log_.warning("the model has no head (lm_head.weight): statistics are complete, the reference NLL is absent");
  }

  void warn_about_text() {
    const Totals totals = token_diversity(corpus_.documents);
    summary_.n_distinct_tokens = totals.n_distinct;
    summary_.commonest_token_share = totals.commonest_share;
    constexpr std::int64_t kFewTokens = 16;
    constexpr double kLargeShare = 0.3;
    if (totals.n_distinct < kFewTokens || totals.commonest_share > kLargeShare)
      log_.warning(fmt::format("the text has low diversity: {} distinct tokens, the commonest makes up {:.1f} %; ranges fitted on it may not "
                               "hold for other text", totals.n_distinct, 100.0 * totals.commonest_share));
  }

  model::ReferenceNll walk(model::LayerTap* tap) {
    const double start = call_.seconds();
    const auto report = [&](const model::RunProgress& p) {
      throw_if_interrupted();
      const double seconds = call_.seconds() - start;
      const double share = static_cast<double>(p.done) / static_cast<double>(std::max<std::int64_t>(1, p.total));
      const std::string label = p.layer_idx < p.n_layers ? fmt::format("layer {} of {}", p.layer_idx + 1, p.n_layers) : std::string("head");
      const double tokens_per_second = share > 0 ? static_cast<double>(header_.data.n_tokens) * share / std::max(seconds, 1e-9) : 0.0;
      progress_.update(label, p.done, p.total, tokens_per_second, share > 0 ? seconds * (1 - share) / share : 0.0, p.layer_finished);
    };
    const model::ReferenceNll nll = model::run_streaming(*model_, corpus_.documents, runner_, tap, report);
    progress_.clear();
    walk_seconds_ = call_.seconds() - start;
    return nll;
  }

  int calibrate() {
    artifacts::StatsWriter writer(options_.output, header_, pool_);
    model::KvTap tap(options_.n_sinks, pool_, [&](const stats::LayerStats& layer) { writer.add_layer(layer); }, log_);
    const model::ReferenceNll nll = walk(&tap);
    summary_.nll_sum = nll.sum;
    summary_.nll_count = nll.count;
    for (const model::MassiveToken& t : tap.massive())
      summary_.massive.push_back({t.layer, t.document, t.token, t.channel, t.value, t.ratio, t.functional_sink});
    warn_about_massive(tap.massive());
    writer.finish(summary_, call_.seconds());
    print_result(nll, tap.seconds());
    return 0;
  }

  int bare_forward() {
    print_result(walk(nullptr), 0.0);
    return 0;
  }

  void warn_about_massive(const std::vector<model::MassiveToken>& massive) {
    std::int64_t n = 0;
    const model::MassiveToken* first = nullptr;
    for (const auto& t : massive)
      if (t.token >= options_.n_sinks && ++n == 1) first = &t;
    if (first)
      log_.warning(
          fmt::format("{} past the {}, the first in layer {}, document {}, token {} (channel {}, {:.1f} "
                      "or {:.0f} times the median): they are quantised like other tokens; --sinks {} would keep it exact",
                      counted(n, "massive activation"), counted(options_.n_sinks, "sink"), first->layer, first->document, first->token, first->channel,
                      first->value, first->ratio, first->token + 1));
  }

  void print_result(const model::ReferenceNll& nll, double statistics_seconds) {
    double sum = 0;
    std::int64_t count = 0;
    for (std::size_t b = 0; b < nll.sum.size(); ++b) sum += nll.sum[b], count += nll.count[b];
    const double tokens_per_second = static_cast<double>(header_.data.n_tokens) / std::max(walk_seconds_, 1e-9);
    const bool wrote = options_.statistics == "all";
    if (call_.json) {
      nlohmann::json j = {{"documents", header_.data.n_documents}, {"tokens", header_.data.n_tokens}, {"seconds", walk_seconds_},
                          {"tokens_per_second", tokens_per_second}, {"statistics_seconds", statistics_seconds},
                          {"peak_memory_bytes", peak_memory_bytes()}, {"massive_activations", summary_.massive.size()},
                          {"warnings", summary_.warnings}};
      if (wrote) j["output"] = to_valid_utf8(options_.output);
      if (count > 0) j["nll_nats"] = sum / static_cast<double>(count);
      fmt::print("{}\n", j.dump(2));
      return;
    }
    if (wrote) fmt::print("{}\n", to_valid_utf8(options_.output));
    fmt::print("{}, {} in {} ({:.0f} tokens/s, statistics {:.0f} %), peak memory {}\n", counted(header_.data.n_documents, "document"),
               counted(header_.data.n_tokens, "token"), format_duration(walk_seconds_), tokens_per_second,
               100.0 * statistics_seconds / std::max(walk_seconds_, 1e-9), format_bytes(static_cast<double>(peak_memory_bytes())));
    if (count > 0)
      fmt::print("reference NLL {:.5f} nats, perplexity {:.4f}\n", sum / static_cast<double>(count), std::exp(sum / static_cast<double>(count)));
    else
      fmt::print("reference NLL not computed: the model has no head\n");
    if (wrote) fmt::print("{}, {}\n", counted(summary_.massive.size(), "massive activation"), counted(progress_.n_warnings(), "warning"));
  }

  int dry_run() {
    const bool with_statistics = options_.statistics == "all";
    const model::RunEstimate e = model::estimate_run(*model_, corpus_.documents, runner_, with_statistics);
    double channels = 0, file_bytes = 0, largest = 0;
    for (const LayerGeometry& g : header_.model.layers) {
      const double n = g.head_dim * (2.0 * g.n_q_heads + 3.0 * g.n_kv_heads);
      const double gram = 8.0 * g.head_dim * g.head_dim * (3.0 * g.n_kv_heads + g.n_q_heads);
      channels += n;
      largest = std::max(largest, n * kStatisticBytesPerChannel + 2 * gram);
      file_bytes += n * file_bytes_per_channel(header_.data.n_tokens) + gram;
    }
    const double cache = std::min(kFileCachePerLayer * static_cast<double>(header_.model.n_layers), kFileCacheLimit);
    const double statistics = with_statistics ? largest + cache : 0.0;
    const double base = static_cast<double>(resident_memory_bytes());
    const double walk = static_cast<double>(e.weights_bytes) + std::max(static_cast<double>(e.activation_bytes) + statistics,
                                                                        static_cast<double>(e.logits_bytes));
    const double memory = base + walk + static_cast<double>(e.hidden_memory_bytes);
    const double seconds = e.forward_seconds * (with_statistics ? 1.2 : 1.0);
    const double disk = with_statistics ? file_bytes : 0.0;
    if (call_.json) {
      const nlohmann::json j = {{"model", to_valid_utf8(options_.run.model)}, {"documents", header_.data.n_documents},
                                {"tokens", header_.data.n_tokens}, {"seq_len", options_.run.seq_len}, {"device", model_->device()},
                                {"dtype", model_->dtype()}, {"threads", call_.n_threads()}, {"sinks", options_.n_sinks},
                                {"attention_rows", options_.attention_rows}, {"seed", options_.run.seed},
                                {"predicted", {{"seconds", seconds}, {"memory_bytes", memory}, {"weights_bytes", e.weights_bytes},
                                               {"activation_bytes", e.activation_bytes}, {"hidden_bytes", e.hidden_memory_bytes},
                                               {"logits_bytes", e.logits_bytes}, {"statistics_bytes", statistics},
                                               {"program_bytes", base}, {"disk_bytes", disk}, {"spill_bytes", e.hidden_spill_bytes}}}};
      fmt::print("{}\n", j.dump(2));
      return 0;
    }
    fmt::print("model      {} ({}, {})\n", to_valid_utf8(options_.run.model), header_.model.architecture, counted(header_.model.n_layers, "layer"));
    fmt::print("text       {}, {}, windows of {}\n", counted(header_.data.n_documents, "document"), counted(header_.data.n_tokens, "token"), options_.run.seq_len);
    fmt::print("run        {} on {}, {}, seed {}, sinks {}, {}\n", model_->dtype(), model_->device(), counted(call_.n_threads(), "thread"),
               options_.run.seed, options_.n_sinks, counted(options_.attention_rows, "attention row"));
    fmt::print("output     {}\n", to_valid_utf8(options_.output));
    fmt::print("time       about {}\n", format_duration(seconds));
    fmt::print("memory     about {}: program {}, weights {}, activations {}, logits {}, statistics {}, hidden states {}\n", format_bytes(memory),
               format_bytes(base), format_bytes(static_cast<double>(e.weights_bytes)), format_bytes(static_cast<double>(e.activation_bytes)),
               format_bytes(static_cast<double>(e.logits_bytes)), format_bytes(statistics), format_bytes(static_cast<double>(e.hidden_memory_bytes)));
    fmt::print("disk       about {} for {}, {} temporary\n", format_bytes(disk), to_valid_utf8(options_.output),
               format_bytes(static_cast<double>(e.hidden_spill_bytes)));
    return 0;
  }

  const KvcalibOptions& options_;
  const Invocation& call_;
  Progress progress_;
  ThreadPool pool_;
  LogSink log_;
  const model::StreamingModel* model_ = nullptr;
  text::Corpus corpus_;
  artifacts::StatsHeader header_;
  artifacts::ReferenceSummary summary_;
  model::RunnerOptions runner_;
  double walk_seconds_ = 0;
};

}  // namespace

int run_kvcalib(const KvcalibOptions& options, const Invocation& call) {
  check_kvcalib(options);
  return Run(options, call).run();
}

}  // namespace calib::tools
