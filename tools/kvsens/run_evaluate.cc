#include <algorithm>
#include <cmath>
#include <functional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/eval_file.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/sens/damage_curve.h"
#include "libcalib/sens/evaluate.h"
#include "libcalib/sens/generate.h"
#include "libcalib/sens/kld_block.h"
#include "libcalib/sens/retrieval.h"
#include "tools/common/option_values.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

std::string bits_text(const std::optional<double>& bits) { return bits ? fmt::format("{:.3f}", *bits) : "-"; }

void print_replies(const sens::EvalResult& result, std::size_t width) {
  const sens::GenerationSettings& g = *result.generation;
  fmt::print("\ngreedy replies of up to {} from depth {}, {}\n", counted(g.n_tokens, "token"), g.depth, counted(g.n_documents, "document"));
  fmt::print("{:<{}}  {:>15}  {:>17}  {:>9}  {:>15}  {:>24}  {:>25}\n", "scheme or plan", width, "rep-4", "repeated suffix", "hit cap", "agreeing prefix",
             "row KLD", "catastrophic (95 %)");
  const auto line = [&](const std::string& name, const sens::EvalReplies& r, const std::string& compared) {
    fmt::print("{:<{}}  {:>6.4f} ± {:>6.4f}  {:>8.1f} ± {:>6.1f}  {:>7.2f} %{}\n", name, width, r.rep_4.mean, r.rep_4.se, r.repeated_suffix.mean,
               r.repeated_suffix.se, 100 * r.hit_cap, compared);
  };
  line("(reference)", *result.reference_replies, "");
  for (const auto& c : result.contenders) {
    const sens::EvalGeneration& x = *c.generation;
    line(to_valid_utf8(c.name), x.replies,
         fmt::format("  {:>6.4f} ± {:>6.4f}  {:>11.4e} ± {:>10.2e}  {:>5}/{:<3} ({:.3f} to {:.3f})", x.agreeing_prefix.mean, x.agreeing_prefix.se, x.row_kld.mean,
                     x.row_kld.se, x.n_catastrophic, g.n_documents, x.catastrophic_low, x.catastrophic_high));
  }
}

/// Hits by length and depth; the last column of a length is the text with four numbers.
void print_retrieval(const sens::EvalResult& result, std::size_t width) {
  fmt::print("\nretrieval: 5-digit numbers told at a depth of the text, or four along it, and asked for at its end; hits\n");
  const std::vector<sens::RetrievalCell>& cells = result.reference_retrieval->cells;
  std::string lengths(width, ' ');
  for (const sens::RetrievalCell& c : cells) lengths += fmt::format("  {:>7}", c.depth == sens::kPasskeyDepths.front() ? fmt::format("T={}", c.length) : "");
  lengths.erase(lengths.find_last_not_of(' ') + 1);
  fmt::print("{}\n{:<{}}", lengths, "scheme or plan", width);
  for (const sens::RetrievalCell& c : cells) fmt::print("  {:>7}", c.depth ? fmt::format("{:.0f} %", 100 * *c.depth) : "4 keys");
  fmt::print("  {:>8}\n", "all");
  const auto line = [&](const std::string& name, const sens::EvalRetrieval& r, const char* verdict) {
    fmt::print("{:<{}}", name, width);
    for (const sens::RetrievalCell& c : r.cells) fmt::print("  {:>7}", fmt::format("{}/{}", c.hits, c.n));
    const sens::RetrievalSum all = sens::sum_hits(r);
    fmt::print("  {:>8}{}\n", fmt::format("{}/{}", all.hits, all.n), verdict);
  };
  line("(reference)", *result.reference_retrieval, "");
  for (const auto& c : result.contenders) line(to_valid_utf8(c.name), *c.retrieval, !c.retrieval->pass ? "  not judged" : *c.retrieval->pass ? "  pass" : "  fail");
}

/// The contenders once more, least output error first.
void print_attention(const sens::EvalResult& result, std::size_t width) {
  std::vector<const sens::EvalContender*> order;
  for (const sens::EvalContender& c : result.contenders) order.push_back(&c);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->attention->e_out.mean < b->attention->e_out.mean; });
  fmt::print("\nattention on the reference's inputs, mean over layers, least output error first\n");
  fmt::print("{:<{}}  {:>22}  {:>22}  {:>22}  {:>22}\n", "scheme or plan", width, "E_out ± SE", "E_mass ± SE", "attention KL ± SE", "worst layer's E_out");
  for (const sens::EvalContender* c : order) {
    const sens::EvalAttention& a = *c->attention;
    const auto worst = std::max_element(a.layer_e_out.begin(), a.layer_e_out.end());
    const auto cell = [](const sens::MeanSe& m) { return fmt::format("{:.3e} ± {:.1e}", m.mean, m.se); };
    fmt::print("{:<{}}  {:>22}  {:>22}  {:>22}  {:>12.3e} (layer {})\n", to_valid_utf8(c->name), width, cell(a.e_out), cell(a.e_mass), cell(a.kl), *worst,
               result.model.layers[static_cast<std::size_t>(worst - a.layer_e_out.begin())].index);
  }
}

/// What the gate of kvsens refine would have said of each contender, beside what was measured.
void print_damage(const sens::EvalResult& result, std::size_t width) {
  const sens::DamageCurve& curve = *result.damage_curve;
  fmt::print("\ndamage curve: noise on every key, {}, {}; x = 1 - lowest layer's correlation of attention scores\n{:>7}  {:>10}  {:>12}\n",
             counted(curve.n_documents, "document"), counted(curve.n_tokens, "token"), "sigma", "x", "PPL ratio");
  for (const sens::DamagePoint& p : curve.points) fmt::print("{:>7g}  {:>10.3e}  {:>12.5f}\n", p.sigma, p.x, p.ppl_ratio);
  fmt::print("{}\n", curve.rejects_from ? fmt::format("a ratio of {:g} is predicted from x = {:.4g} on", sens::kRuinedPplRatio, *curve.rejects_from)
                                        : fmt::format("the curve never reaches a ratio of {:g}: it rejects nothing", sens::kRuinedPplRatio));
  fmt::print("{:<{}}  {:>10}  {:>11}  {:>12}  {:>12}\n", "scheme or plan", width, "x", "worst layer", "predicted", "measured");
  for (const sens::EvalContender& c : result.contenders)
    fmt::print("{:<{}}  {:>10.3e}  {:>11}  {:>12.5f}  {:>12.5f}{}\n", to_valid_utf8(c.name), width, c.damage->x, c.damage->worst_layer,
               c.damage->predicted_ppl_ratio, c.total.ppl_ratio.mean, c.damage->rejected ? "  rejected" : "");
}

std::string slope_text(const std::optional<sens::MeanSe>& slope) {
  return slope ? fmt::format("  {:>5.2f} ± {:>4.2f}", slope->mean, slope->se) : fmt::format("  {:>12}", "-");
}

std::string marks(const sens::EvalContender& c) {
  std::string out;
  if (c.indistinguishable) out += "  indistinguishable";
  if (c.length_limit) out += fmt::format("  ratio above {:.2f} from position {}", sens::kPplRatioMax, *c.length_limit);
  for (const std::string& flag : c.flags) out += "  " + flag;
  return out;
}

void print_table(const sens::EvalResult& result, const std::string& output) {
  std::size_t width = 18;
  for (const auto& c : result.contenders) width = std::max(width, to_valid_utf8(c.name).size());
  fmt::print("{}, {}{}, prefill={}, backend={}, reference perplexity {:.4f} ± {:.4f}\n", counted(result.settings.n_documents, "document"),
             counted(result.settings.n_rows, "row"), result.settings.second_half ? " of second halves" : "", result.settings.prefill, result.settings.backend,
             result.noise_floor.ppl_base.mean, result.noise_floor.ppl_base.se);
  fmt::print("{:<{}}  {:>9}  {:>9}  {:>24}  {:>11}  {:>15}  {:>20}  {:>12}\n", "scheme or plan", width, "bits@2048", "bits@8192", "mean KLD ± SE", "99% KLD",
             "same top p", "PPL ratio", "length slope");
  const auto line = [&](const std::string& name, const std::string& bits2, const std::string& bits8, const sens::KldBlock& b, const std::string& rest) {
    fmt::print("{:<{}}  {:>9}  {:>9}  {:>11.4e} ± {:>9.2e}  {:>11.4e}  {:>6.2f} ± {:>4.2f} %  {:>8.5f} ± {:>8.5f}{}\n", name, width, bits2, bits8, b.kld.mean,
               b.kld.se, b.kld_percentiles[1], b.same_top_p.mean, b.same_top_p.se, b.ppl_ratio.mean, b.ppl_ratio.se, rest);
  };
  for (const auto& c : result.contenders)
    line(to_valid_utf8(c.name), bits_text(c.effective_bits_2048), bits_text(c.effective_bits_8192), c.total, slope_text(c.kld_slope) + marks(c));
  line("(noise floor)", "", "", result.noise_floor, "");
  if (result.negative_control) line("(negative control)", "", "", result.negative_control->total, "");
  if (!result.contenders.empty() && result.contenders.front().attention) print_attention(result, width);
  if (result.damage_curve) print_damage(result, width);
  if (result.generation) print_replies(result, width);
  if (result.reference_retrieval) print_retrieval(result, width);
  fmt::print("{}\n", to_valid_utf8(output));
}

std::int64_t most_sinks(const std::vector<sens::Contender>& contenders) {
  std::int64_t most = 0;
  for (const sens::Contender& c : contenders) most = std::max(most, c.header.n_sinks);
  return most;
}

int dry_run(const EvaluateCommand& options, const Invocation& call, const Inputs& in, const std::vector<sens::Contender>& contenders,
            const sens::EvaluateOptions& settings, const sens::GenerateOptions& generation, const std::vector<sens::RetrievalCase>& cases) {
  const sens::EvaluateEstimate e = sens::estimate_evaluate(*in.model, in.corpus.documents, contenders.size(), settings);
  const std::int64_t generation_bytes = generation.n_tokens > 0 ? sens::generate_bytes(*in.model, in.corpus.documents.size(), generation) : 0;
  const sens::EvaluateEstimate r = cases.empty() ? sens::EvaluateEstimate{} : sens::estimate_retrieval(*in.model, cases, contenders.size(), settings);
  const double memory = static_cast<double>(std::max({e.hidden_memory_bytes + e.working_bytes, r.hidden_memory_bytes + r.working_bytes, generation_bytes}) +
                                            resident_memory_bytes());
  constexpr double kMixedPass = 1.2;  // a pass over a changed cache beside a bare one
  const double gate = options.damage_curve ? damage_passes(in, most_sinks(contenders)) : 0;
  const double runs = static_cast<double>(contenders.size());
  double seconds = kMixedPass * (runs + 3 + gate) * forward_seconds(in);
  if (!cases.empty()) seconds += kMixedPass * (runs + 1) * forward_seconds(*in.model, sens::documents_of(cases));
  const double spill = static_cast<double>(std::max(e.hidden_spill_bytes, r.hidden_spill_bytes));
  if (call.json) {
    nlohmann::ordered_json names = nlohmann::ordered_json::array();
    for (const auto& c : contenders) names.push_back({{"name", to_valid_utf8(c.header.name)}, {"effective_bits_8192", c.header.effective_bits_8192.value_or(0)}});
    const nlohmann::ordered_json j = {
        {"model", to_valid_utf8(options.run.model)},
        {"documents", in.corpus.documents.size()},
        {"tokens", in.corpus.identity.n_tokens},
        {"contenders", names},
        {"second_half", options.second_half},
        {"predicted", {{"seconds", seconds}, {"memory_bytes", memory}, {"hidden_bytes", e.hidden_memory_bytes}, {"spill_bytes", spill}}}};
    fmt::print("{}\n", j.dump(2));
    return 0;
  }
  fmt::print("model      {} ({}, {})\n", to_valid_utf8(options.run.model), in.identity.architecture, counted(in.identity.n_layers, "layer"));
  fmt::print("text       {}, {}{}\n", counted(in.corpus.documents.size(), "document"), counted(in.corpus.identity.n_tokens, "token"),
             options.second_half ? ", second halves scored" : "");
  for (const auto& c : contenders)
    fmt::print("contender  {}: {}, {} effective bits at 8192\n", to_valid_utf8(c.header.name), c.header.description, bits_text(c.header.effective_bits_8192));
  if (generation.n_tokens > 0)
    fmt::print("replies    up to {} after prompts of {}, {} in all\n", counted(generation.n_tokens, "token"), generation.depth,
               counted(static_cast<std::int64_t>(contenders.size() + 1) * generation.n_tokens * static_cast<std::int64_t>(in.corpus.documents.size()), "token"));
  if (!cases.empty())
    fmt::print("retrieval  {} of {} to {}\n", counted(cases.size(), "text"), cases.front().document.ids.size(),
               counted(cases.back().document.ids.size(), "token"));
  fmt::print("time       about {}{}\n", format_duration(seconds), generation.n_tokens > 0 ? ", replies not counted" : "");
  fmt::print("memory     about {}, hidden states {} of it\n", format_bytes(memory), format_bytes(static_cast<double>(e.hidden_memory_bytes)));
  fmt::print("disk       {} temporary for hidden states\n", format_bytes(spill));
  return 0;
}

void measure_damage(const Inputs& in, const std::vector<sens::Contender>& contenders, const sens::EvaluateOptions& settings, ThreadPool& pool,
                    const Invocation& call, Progress& progress, sens::EvalResult& result) {
  sens::DamageOptions options;
  options.n_sinks = most_sinks(contenders);
  options.second_half = settings.second_half;
  options.seed = settings.seed;
  options.hidden_memory_bytes = settings.hidden_memory_bytes;
  const double passes = damage_passes(in, options.n_sinks);
  PhaseProgress phases(progress, call, static_cast<std::int64_t>(passes * static_cast<double>(in.corpus.identity.n_tokens)));
  const sens::DamageGate gate(*in.model, sens::damage_documents(in.corpus.documents, options.n_sinks), options, pool,
                              [&](const sens::EvaluateProgress& p) { phases.update("damage curve", p.done, p.total); });
  const std::vector<sens::EvalDamage> damage = gate.judge(contenders);
  for (std::size_t c = 0; c < damage.size(); ++c) result.contenders[c].damage = damage[c];
  result.damage_curve = gate.curve();
}

/// Behind each contender what `variants` makes of it. Throws kUsage naming the option if that is nothing at all: `none` of them.
void add_variants(std::vector<sens::Contender>& contenders, const char* option, const char* none,
                  const std::function<std::vector<std::optional<sens::Contender>>(const sens::Contender&)>& variants) {
  std::vector<sens::Contender> out;
  for (const sens::Contender& c : contenders) {
    out.push_back(c);
    for (std::optional<sens::Contender>& variant : variants(c))
      if (variant) out.push_back(std::move(*variant));
  }
  if (out.size() == contenders.size()) fail(ErrorKind::kUsage, option, "no contender has {}", none);
  contenders = std::move(out);
}

/// What the options ask to measure once more. Options add up: a rotated contender may carry its errors too.
void add_asked_variants(std::vector<sens::Contender>& contenders, const EvaluateCommand& options, const Inputs& in, const Statistics& statistics) {
  if (const std::vector<std::int64_t> intervals = parse_intervals(options.scale_refresh); !intervals.empty()) {
    if (intervals.front() >= in.corpus.longest())
      fail(ErrorKind::kInfeasible, "--scale-refresh", "is {}, but no document is longer ({}): nothing would be refreshed", intervals.front(),
           counted(in.corpus.longest(), "token"));
    add_variants(contenders, "--scale-refresh", "static ranges of one a unit or KV head without center, smooth or had (fp8-vllm and fp8-head have)",
                 [&](const sens::Contender& c) {
                   std::vector<std::optional<sens::Contender>> out;
                   for (const std::int64_t interval : intervals) out.push_back(sens::refreshed_contender(c, in.identity, interval));
                   return out;
                 });
  }
  if (!options.rotate.empty()) {
    const quant::RotationKind kind = quant::parse_rotation("--rotate", options.rotate);
    const sens::RotationProvider rotations = statistics.rotations(kind);
    add_variants(contenders, "--rotate", kind == quant::RotationKind::kQuery ? "had (int4.token.g.had on either side has)" : "keys with had (int4.token.g.had has)",
                 [&](const sens::Contender& c) { return std::vector{sens::rotated_contender(c, in.identity, kind, rotations)}; });
  }
  if (const std::vector<double> shares = parse_carry(options.value_carry); !shares.empty())
    add_variants(contenders, "--carry-value-error", "values in token groups without ef and lowrank (int4.token.g32 has)", [&](const sens::Contender& c) {
      std::vector<std::optional<sens::Contender>> out;
      for (const double share : shares) out.push_back(sens::carrying_contender(c, share));
      return out;
    });
}

}  // namespace

int run_evaluate(const EvaluateCommand& options, const Invocation& call) {
  const std::vector<std::string> uniform = split_list("--uniform", options.uniform);
  if (uniform.empty() && options.plans.empty())
    fail(ErrorKind::kUsage, "evaluate", "has nothing to measure: give --plan plan.json, --uniform PRESET,… or both");
  if (options.depth > 0 && options.generate == 0) fail(ErrorKind::kUsage, "--depth", "is the length of the prompts of --generate, which is not given");
  if (options.backend != "fake" && options.backend != "kvrt")
    fail(ErrorKind::kUsage, "--backend", "is \"{}\", expected fake or kvrt", options.backend);
  if (options.objective != "logits" && options.objective != "attention")
    fail(ErrorKind::kUsage, "--objective", "is \"{}\", expected logits or attention", options.objective);
  if (options.damage_curve && options.backend == "kvrt") fail(ErrorKind::kUnsupported, "--damage-curve", "compares scores in place; leave --backend kvrt out");
  if (options.objective == "attention" && options.backend == "kvrt")
    fail(ErrorKind::kUnsupported, "--objective attention", "is measured in place; leave --backend kvrt out");
  const std::vector<std::int64_t> lengths = parse_lengths(options.retrieval);
  require_model_and_data(options.run);
  std::vector<std::string> files = inputs_of(options.run);
  files.push_back(options.stats);
  for (const std::string& path : options.plans)
    for (std::string& file : artifacts::plan_input_files(path)) files.push_back(std::move(file));
  check_output(options.output, files, kEvalOutput);
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  Inputs in = open_inputs(options.run, call, log);
  const Statistics statistics(options.stats, in.identity, options.run.model);
  const sens::ParamsProvider provider = statistics.provider();

  std::vector<sens::Contender> contenders;
  for (const std::string& text : uniform)
    contenders.push_back(sens::uniform_contender(text, in.identity, {options.n_sinks, options.window}, provider, log, statistics.saliency()));
  for (const std::string& path : options.plans) contenders.push_back(plan_contender(path, artifacts::read_plan(path, log), in.identity, options.run.model));
  add_asked_variants(contenders, options, in, statistics);
  for (const sens::Contender& c : contenders) check_something_is_coded(c, in.corpus.longest());
  if (options.damage_curve && sens::damage_documents(in.corpus.documents, most_sinks(contenders)).empty())
    fail(ErrorKind::kInfeasible, "--damage-curve", "compares rows that see {} keys, and no document has so many tokens; take a longer --seq-len or text",
         sens::kLeastScores);
  sens::EvaluateOptions settings;
  settings.second_half = options.second_half;
  settings.packed = options.backend == "kvrt";
  settings.attention = options.objective == "attention";
  settings.seed = static_cast<std::uint64_t>(options.run.seed);
  settings.hidden_memory_bytes = options.run.hidden_mem;
  sens::GenerateOptions generation;
  generation.n_tokens = options.generate;
  generation.depth = options.depth > 0 ? options.depth : in.corpus.longest();
  generation.end_token = in.end_token;
  generation.packed = settings.packed;
  generation.cache_memory_bytes = options.run.hidden_mem;
  if (options.generate > 0) sens::check_generate(*in.model, in.corpus.documents, contenders, generation);
  std::vector<sens::RetrievalCase> cases;
  if (!lengths.empty()) {
    cases = sens::retrieval_cases(*in.model->load_tokenizer(), in.corpus.documents, lengths, in.identity.max_positions, settings.seed);
    sens::check_retrieval(cases, contenders);
  }
  if (options.run.dry_run) return dry_run(options, call, in, contenders, settings, generation, cases);

  sens::EvalResult result;
  result.provenance = in.provenance;
  result.model = in.identity;
  result.data = in.corpus.identity;
  if (statistics.given()) {
    result.provenance.parents.emplace_back("stats", sha256_of_file(options.stats));
    result.calibration_data = statistics.header().data;
    result.same_text_as_calibration = same_text(result.data, *result.calibration_data);
    if (result.same_text_as_calibration) log.warning("measured on the text of the statistics; held-out text is needed for a verdict");
  }
  for (const sens::Contender& c : contenders)
    if (c.header.kind == "plan") result.provenance.parents.emplace_back("plan", c.header.plan_sha256);
  progress.say(fmt::format("{}: {}, {}, {} beside reference, noise floor and negative control", in.identity.name,
                           counted(in.corpus.documents.size(), "document"), counted(result.data.n_tokens, "token"), counted(contenders.size(), "contender")));
  warn_untested_positions(in.identity, result.data, log);
  ThreadPool pool(call.n_threads());
  PhaseProgress phases(progress, call, result.data.n_tokens * static_cast<std::int64_t>(contenders.size() + 3));
  sens::evaluate(*in.model, in.corpus.documents, contenders, settings, pool, &result, log,
                 [&](const sens::EvaluateProgress& p) { phases.update("evaluate", p.done, p.total); });
  if (options.damage_curve) measure_damage(in, contenders, settings, pool, call, progress, result);
  if (options.generate > 0) {
    const auto prompts = static_cast<std::int64_t>(in.corpus.documents.size()), runs = static_cast<std::int64_t>(contenders.size());
    PhaseProgress replies(progress, call, prompts * (generation.depth + generation.n_tokens) * (1 + 3 * runs));
    sens::generate(*in.model, in.corpus.documents, contenders, generation, pool, &result, log,
                   [&](const sens::EvaluateProgress& p) { replies.update("generate", p.done, p.total); });
  }
  if (!cases.empty()) {
    std::int64_t tokens = 0;
    for (const sens::RetrievalCase& c : cases) tokens += static_cast<std::int64_t>(c.document.ids.size());
    PhaseProgress finding(progress, call, tokens * static_cast<std::int64_t>(contenders.size() + 1));
    sens::retrieve(*in.model, cases, contenders, settings, pool, &result, log,
                   [&](const sens::EvaluateProgress& p) { finding.update("retrieval", p.done, p.total); });
  }
  progress.clear();
  result.provenance.seconds = call.seconds();
  artifacts::write_eval_file(options.output, result);
  if (call.json) fmt::print("{}", artifacts::eval_to_json(result));
  else print_table(result, options.output);
  return 0;
}

int run_kvsens(const KvsensOptions& options, const Invocation& call) {
  if (options.refine_chosen) return run_refine(options.refine, call);
  if (options.isolate_chosen) return run_isolate(options.isolate, call);
  if (options.joint_chosen) return run_joint(options.joint, call);
  if (options.saliency_chosen) return run_saliency(options.saliency, call);
  if (options.drift_chosen) return run_drift(options.drift, call);
  return options.evaluate_chosen ? run_evaluate(options.evaluate, call) : run_grid(options.grid, call);
}

}  // namespace calib::tools
