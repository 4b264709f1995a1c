#include "libcalib/plan/restrictions.h"

#include <algorithm>

#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"
#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

/// Conversion instructions for FP8 came with compute capability 8.9.
struct Arch {
  const char* name;
  bool fp8;
};
constexpr Arch kArchs[] = {{"sm_70", false}, {"sm_75", false}, {"sm_80", false}, {"sm_86", false}, {"sm_87", false}, {"sm_89", true},
                           {"sm_90", true},  {"sm_100", true}, {"sm_103", true}, {"sm_110", true}, {"sm_120", true}, {"sm_121", true}};

const Arch* find_arch(const std::string& name) {
  const auto found = std::find_if(std::begin(kArchs), std::end(kArchs), [&](const Arch& a) { return name == a.name; });
  return found == std::end(kArchs) ? nullptr : found;
}

}  // namespace

std::vector<std::string> scheme_list(const std::vector<std::string>& texts, const std::string& option) {
  std::vector<std::string> list;
  for (const std::string& text : texts) {
    kvrt::Scheme scheme;
    std::string error;
    if (!kvrt::parse_scheme(text, &scheme, &error)) fail(ErrorKind::kUsage, option + " " + text, "{}", error);
    const std::string canonical = kvrt::to_string(scheme);
    if (std::find(list.begin(), list.end(), canonical) != list.end()) fail(ErrorKind::kUsage, option + " " + text, "given twice; name each scheme once");
    list.push_back(canonical);
  }
  return list;
}

void check_arch(const std::string& arch) {
  if (arch.empty() || find_arch(arch)) return;
  std::string known;
  for (const Arch& a : kArchs) known += std::string(known.empty() ? "" : ", ") + a.name;
  fail(ErrorKind::kUsage, "--arch " + arch, "unknown device capability; known: {}", known);
}

std::string missing_on_arch(const std::string& arch, kvrt::Format format) {
  const Arch* const known = arch.empty() ? nullptr : find_arch(arch);
  const bool fp8 = format == kvrt::Format::kFp8E4m3 || format == kvrt::Format::kFp8E5m2;
  return known && fp8 && !known->fp8 ? fmt::format("{} has no FP8 instructions: values are converted in software", arch) : "";
}

std::string restrictions_text(const Restrictions& r) {
  std::vector<std::string> parts;
  const auto list = [&](const char* option, const auto& items, const char* noun) {
    constexpr std::size_t kMostNamed = 3;
    if (items.size() > kMostNamed) parts.push_back(fmt::format("{} ({})", option, counted(items.size(), noun)));
    else if (!items.empty()) parts.push_back(fmt::format("{} {}", option, fmt::join(items, ",")));
  };
  list("--allow-k", r.k, "scheme");
  list("--allow-v", r.v, "scheme");
  if (r.same_kv) parts.push_back("--same-kv");
  if (r.one_pair) parts.push_back("--one-pair");
  list("--skip-layers", r.skip_layers, "layer");
  if (!r.arch.empty()) parts.push_back("--arch " + r.arch);
  return fmt::format("{}", fmt::join(parts, " "));
}

}  // namespace calib::plan
