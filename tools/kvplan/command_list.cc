#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/io/json.h"
#include "libcalib/quant/scheme.h"
#include "tools/kvplan/commands.h"

namespace calib::tools {
int run_list(const KvplanOptions& options, const Invocation& call, Progress&) {
  const bool all = options.what == "all";
  if (!all && options.what != "presets" && options.what != "candidates")
    fail(ErrorKind::kUsage, "kvplan list", "knows presets, candidates and all, not \"{}\"", options.what);
  nlohmann::ordered_json out;
  if (all || options.what == "presets") {
    if (!call.json) fmt::print("{:<20}  {:<32}  {:<22}  {:>5}  {:>6}\n", "preset", "K", "V", "sinks", "window");
    for (const quant::Preset& p : quant::presets()) {
      if (!call.json) fmt::print("{:<20}  {:<32}  {:<22}  {:>5}  {:>6}{}\n", p.name, p.k, p.v, p.n_sinks, p.window,
                                 p.salient_fraction > 0 ? fmt::format("  salient {:g} at {}", p.salient_fraction, p.salient) : "");
      out["presets"].push_back({{"name", p.name}, {"k", p.k}, {"v", p.v}, {"sinks", p.n_sinks}, {"window", p.window}, {"offered", true}});
      if (p.salient_fraction > 0) out["presets"].back()["salient"] = {{"fraction", p.salient_fraction}, {"scheme", p.salient}};
    }
    for (const quant::NamedOnly& p : quant::presets_by_name_only()) {
      if (!call.json) fmt::print("{:<20}  {}\n", p.name, p.reason);
      out["presets"].push_back({{"name", p.name}, {"offered", true}, {"import", p.reason}});
    }
    if (!call.json) fmt::print("\n");
  }
  if (all || options.what == "candidates") {
    const quant::CandidateList list = quant::resolve_candidates("default");
    out["candidates"] = {{"name", list.name}, {"k", list.k}, {"v", list.v}};
    if (!call.json) {
      fmt::print("candidates {} ({} strings)\nK", list.name, list.k.size() + list.v.size());
      for (const std::string& text : list.k) fmt::print("  {}\n ", text);
      fmt::print("\nV");
      for (const std::string& text : list.v) fmt::print("  {}\n ", text);
      fmt::print("\n");
    }
  }
  if (call.json) fmt::print("{}", io::json_text(out, "standard output"));
  return 0;
}

}  // namespace calib::tools
