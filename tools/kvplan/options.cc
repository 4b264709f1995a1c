#include "tools/kvplan/options.h"

#include <CLI/CLI.hpp>

#include "libcalib/base/error.h"
#include "tools/common/option_values.h"

namespace calib::tools {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 32;

void add_plan_argument(CLI::App& app, std::string& plan) {
  app.add_option("plan", plan, "Plan to read")->type_name("PLAN")->group("Input")->required();
}

CLI::App* add_command(CLI::App& app, KvplanOptions& o, const char* name, const char* help, KvplanOptions::Command command) {
  CLI::App* sub = app.add_subcommand(name, help);
  sub->callback([&o, command] { o.command = command; });
  return sub;
}

void declare_plan(CLI::App& app, KvplanOptions& o) {
  add_text(app, "--stats", o.stats, "Statistics of kvcalib", "Input", "FILE");
  add_text(app, "--sens", o.sens, "Scores of kvsens", "Input", "FILE");
  add_text(app, "--saliency", o.saliency, "Token saliency of kvsens: where the salient tiers that the scores hold may stand", "Input", "FILE");
  add_text(app, "-o,--output", o.output, "Plan to write; constants go to a .safetensors file beside it", "Output", "FILE");
  add_text(app, "--budget", o.budget, "Effective bits (4.5), bytes for the context (12GiB) or per token (6000B/token)", "Budget", "B");
  add_text(app, "--max-kl", o.max_kl, "Smallest plan whose predicted mean KL stays below this, in nats", "Budget", "X");
  add_text(app, "--max-ppl-ratio", o.max_ppl_ratio, "Smallest plan whose predicted perplexity ratio stays below this", "Budget", "X");
  add_text(app, "--profile", o.profile, "accuracy (8.0 to 5.33 bits) or compact (4.0 to 2.67 bits)", "Budget", "NAME");
  add_text(app, "--uniform", o.uniform, "One pair for every layer: PRESET or KSCHEME:VSCHEME", "Budget", "NAME");
  add_integer(app, "--context", o.context, 1, kMostTokens, "Tokens of a sequence at which bytes are counted", "Budget");
  add_integer(app, "--batch", o.batch, 1, 1 << 20, "Sequences at which bytes are counted", "Budget");
  add_text(app, "--metric", o.metric, "Score to spend; unset: first present of logit_kl fisher_softmax fisher_vec lookahead fisher attn_out", "Search", "NAME");
  add_flag(app, "--window-per-layer", o.window_per_layer, "Let every layer choose among the scored windows", "Search");
  add_integer(app, "--sinks", o.sinks, -1, kMostTokens, "Exact first tokens of a KSCHEME:VSCHEME pair, -1 = 4; presets bring their own", "Search");
  add_integer(app, "--window", o.window, -1, kMostTokens, "Exact newest tokens of a KSCHEME:VSCHEME pair, -1 = 128; presets bring their own", "Search");
  add_integer(app, "--page-tokens", o.page_tokens, 32, 128, "Tokens of a page: 32, 64 or 128", "Search");
  add_integer(app, "--seed", o.seed, 0, INT64_MAX, "Seed of the random baseline", "Search");
  add_text(app, "--target", o.target, "Runtime to plan for", "Target", "NAME");
  add_text(app, "--arch", o.arch, "Device capability to plan for: formats without instructions there are left out", "Target", "sm_NN");
  add_list(app, "--allow-k", o.allow_k, "Schemes that K may take, of those scored", "Target", "S,S...");
  add_list(app, "--allow-v", o.allow_v, "Schemes that V may take, of those scored", "Target", "S,S...");
  add_flag(app, "--same-kv", o.same_kv, "One scheme for K and V of a layer", "Target");
  add_flag(app, "--one-pair", o.one_pair, "One (K, V) pair for all layers", "Target");
  add_list(app, "--skip-layers", o.skip_layers, "Layers kept in bf16, as 0,3,5-8", "Target", "L,L...");
  add_flag(app, "--dry-run", o.dry_run, "Search and print, but write nothing", "Diagnostics");
}

}  // namespace

void declare_kvplan(CLI::App& app, KvplanOptions& o) {
  declare_plan(app, o);
  app.require_subcommand(0, 1);
  CLI::App* plan = add_command(app, o, "plan", "Make a plan (what kvplan does without a sub-command)", KvplanOptions::Command::kPlan);
  plan->fallthrough();
  add_plan_argument(*add_command(app, o, "show", "One line a layer, and totals", KvplanOptions::Command::kShow), o.plan);
  CLI::App* explain = add_command(app, o, "explain", "Why a layer is stored as it is", KvplanOptions::Command::kExplain);
  add_plan_argument(*explain, o.plan);
  add_text(*explain, "--layer", o.layer, "Layer number; empty = all", "Input", "N");
  CLI::App* check = add_command(app, o, "check", "Recount a plan and compare it with its model; exit 1 if it does not hold", KvplanOptions::Command::kCheck);
  add_plan_argument(*check, o.plan);
  add_text(*check, "--model", o.model, "Model that the plan must be for", "Input", "PATH");
  add_text(*check, "--stats", o.stats, "Statistics that must be of the same model", "Input", "FILE");
  CLI::App* diff = add_command(app, o, "diff", "What differs between two plans", KvplanOptions::Command::kDiff);
  add_plan_argument(*diff, o.plan);
  diff->add_option("other", o.other_plan, "Plan to compare with")->type_name("PLAN")->group("Input")->required();
  CLI::App* memory = add_command(app, o, "memory", "Bytes of a plan at several context lengths, or of every preset for a model", KvplanOptions::Command::kMemory);
  memory->add_option("plan", o.plan, "Plan to read")->type_name("PLAN")->group("Input");
  add_text(*memory, "--model", o.model, "Model whose presets to count: a folder or config.json, or a GGUF file; weights are not read", "Input", "PATH");
  add_text(*memory, "--stats", o.stats, "Statistics that name the model instead", "Input", "FILE");
  add_list(*memory, "--contexts", o.contexts, "Context lengths of a plan, separated by commas", "Budget", "T,T...");
  add_integer(*memory, "--context", o.context, 1, kMostTokens, "Context length for a model", "Budget");
  add_integer(*memory, "--page-tokens", o.page_tokens, 32, 128, "Tokens of a page: 32, 64 or 128, for a model", "Budget");
  add_integer(*memory, "--batch", o.batch, 1, 1 << 20, "Sequences", "Budget");
  CLI::App* list = add_command(app, o, "list", "Presets and the default candidates", KvplanOptions::Command::kList);
  list->add_option("what", o.what, "presets, candidates or all")->type_name("WHAT")->group("Input");
  CLI::App* import = add_command(app, o, "import", "A plan from another tool's file", KvplanOptions::Command::kImport);
  import->add_option("source", o.source, "File to import")->type_name("FILE")->group("Input")->required();
  add_text(*import, "--from", o.from, "Tool that wrote it: kvtuner", "Input", "TOOL");
  add_text(*import, "--base-model", o.model, "Model that the plan is for: a folder or a GGUF file", "Input", "PATH");
  add_text(*import, "--mode", o.mode, "What KVTuner's widths mean: pertoken (per token, no window) or kivi (keys per channel, window 32)", "Input", "MODE");
  add_text(*import, "--stats", o.stats, "Statistics of the same model, for the reasons in the plan; without --base-model they name the model too", "Input", "FILE");
  add_text(*import, "-o,--output", o.output, "Plan to write", "Output", "FILE");
  add_integer(*import, "--context", o.context, 1, kMostTokens, "Tokens of a sequence at which bytes are counted", "Budget");
  add_integer(*import, "--batch", o.batch, 1, 1 << 20, "Sequences at which bytes are counted", "Budget");
  add_integer(*import, "--page-tokens", o.page_tokens, 32, 128, "Tokens of a page: 32, 64 or 128", "Budget");
  add_flag(*import, "--fast-identity", o.fast_identity, "Identify the weights by sizes and header instead of content", "Diagnostics");
  add_flag(*import, "--dry-run", o.dry_run, "Read and print, but write nothing", "Diagnostics");
  for (const char* name : {"export", "refine"}) {
    CLI::App* sub = app.add_subcommand(name, "Not offered by this version");
    sub->allow_extras();
    // Thrown while parsing: its own options are unknown, but the command is what there is to say.
    sub->callback([name] {
      fail(ErrorKind::kUnsupported, std::string("kvplan ") + name,
           "is not offered by this version; a plan is read by kvsens evaluate and by the runtime library as it is");
    });
  }
}

}  // namespace calib::tools
