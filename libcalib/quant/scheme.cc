#include "libcalib/quant/scheme.h"

#include <algorithm>
#include <optional>

#include "kernels/codec/group_range.h"

namespace calib::quant {
namespace {

std::vector<Preset> make_presets() {
  std::vector<Preset> list = {
      {"bf16", "bf16", "bf16", 4, 128, ""},
      {"fp8-vllm", "fp8e4m3.tensor", "fp8e4m3.tensor", 0, 0, ""},
      {"fp8-head", "fp8e4m3.head", "fp8e4m3.head", 4, 128, ""},
      {"int8-token", "int8.token.g", "int8.token.g", 4, 128, ""},
      {"int8-channel", "int8.channel.static.pre", "int8.token.g", 4, 128, ""},
      {"int4-gqa", "int4.token.g", "int4.token.g", 4, 128, "row-wise int4"},
      {"int4-gqa-g32", "int4.token.g32", "int4.token.g32", 4, 128, "row-wise int4 in groups of 32"},
      {"flexgen4", "int4.token.g64", "int4.token.g64", 4, 128, ""},
      {"smoothattention4", "int4.token.g128.smooth", "int4.token.g128", 4, 128, "key factors moved to the query"},
      {"kivi4", "int4.channel.g32", "int4.token.g32", 0, 128, ""},
      {"kivi2", "int2.channel.g32", "int2.token.g32", 0, 128, ""},
  };
  for (const char bits : {'4', '3', '2'})
    for (const bool outliers : {false, true}) {
      const std::string format = std::string("nuq") + bits, out = outliers ? ".out1" : "";
      list.push_back({std::string("kvquant") + bits + (outliers ? "-1pct" : ""), format + ".channel.static.pre" + out,
                      format + ".token.g" + out, 1, 128, ""});
    }
  list.push_back({"quarot4", "int4.token.g.had", "int4.token.g.had", 4, 128, "rotation of q and k after RoPE"});
  for (const char* format : {"q8_0", "q4_0"})
    for (const bool had : {false, true}) {
      const std::string scheme = std::string(format) + (had ? ".had" : "");
      list.push_back({std::string("llamacpp-") + format + (had ? "-had" : ""), scheme, scheme, 0, 0, ""});
    }
  list.push_back({"turboquant4", "lm4.token.g.had", "lm4.token.g.had", 4, 128, ""});
  list.push_back({"turboquant3", "lm3.token.g.had", "lm3.token.g.had", 4, 128, ""});
  list.push_back({"nvfp4", "nvfp4", "nvfp4", 4, 128, ""});
  list.push_back({"tiered4", "int4.token.g128", "int4.token.g128", 4, 2, "three tiers", 0.2, "fp8e4m3.token.g"});
  return list;
}

std::string known_names() {
  std::string text;
  for (const Preset& p : presets()) text += (text.empty() ? "" : ", ") + p.name;
  for (const NamedOnly& n : presets_by_name_only()) text += std::string(", ") + n.name;
  return text;
}

const Preset* find_preset(const std::string& name) {
  for (const Preset& p : presets())
    if (p.name == name) return &p;
  for (const NamedOnly& n : presets_by_name_only())
    if (name == n.name) fail(ErrorKind::kUsage, name, "this preset is {}", n.reason);
  return nullptr;
}

/// Token groups of a preset that exceed head_dim become head_dim (FORMATS.md 2).
std::string fit_group(const std::string& preset, const char* side, const std::string& text, int head_dim, const LogSink& log) {
  kvrt::Scheme scheme = parse_scheme(text);
  if (scheme.granularity != kvrt::Granularity::kToken || scheme.group <= head_dim) return text;
  scheme.group = 0;
  const std::string fitted = kvrt::to_string(scheme);
  log.note(fmt::format("{}: {} {} becomes {} at head_dim {}", preset, side, text, fitted, head_dim));
  return fitted;
}

void warn_of_doubtful_parts(const std::vector<std::string>& schemes, const LogSink& log) {
  for (const std::string& text : schemes)
    if (const std::string doubt = doubtful_parts(parse_scheme(text)); !doubt.empty()) log.warning(fmt::format("{}: {}", text, doubt));
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

/// Parts for keys only: by the grammar, or (`ef`) because values gain nothing (METHODS.md 4.11); K:V asks for it on values.
bool keys_only(const kvrt::Scheme& scheme) { return scheme.pre || scheme.smooth || scheme.pair || scheme.ef; }

void append_unique(std::vector<std::string>& list, const std::string& item) {
  if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
}

/// default-1 of FORMATS.md 2: 19 key strings and 15 value strings.
void append_default_1(CandidateList& list) {
  for (const char* text : {"bf16", "fp8e4m3.head", "int8.token.g", "int8.channel.g64.pre"}) append_unique(list.k, text);
  for (const char* group : {"g32", "g64"})
    for (const char* modifier : {"", ".had", ".center.had"})
      append_unique(list.k, std::string("int4.token.") + group + modifier);
  for (const char* group : {"g32", "g64"})
    for (const char* frame : {"", ".pre"}) append_unique(list.k, std::string("int4.channel.") + group + frame);
  for (const char* text : {"int3.channel.g32.pre", "int3.channel.g64.pre", "int3.token.g64.center.had", "int2.channel.g32.pre",
                           "int2.channel.g64.pre"})
    append_unique(list.k, text);
  for (const char* text : {"bf16", "fp8e4m3.head", "int8.token.g"}) append_unique(list.v, text);
  for (const char* format : {"int4", "int3", "int2"})
    for (const char* group : {"g32", "g64"})
      for (const char* modifier : {"", ".had"})
        append_unique(list.v, std::string(format) + ".token." + group + modifier);
}

/// default-2: error feedback on every integer key string up to 4 bits, and Lloyd-Max codebooks on both sides. Fitted codebooks and static
/// channels are asked for by name: they gain little beside these (scripts/bench/RESULTS.md) and hold only for what calibration has seen.
void append_default_2(CandidateList& list) {
  append_default_1(list);
  for (const std::string& text : std::vector<std::string>(list.k))
    if (text.rfind("int4", 0) == 0 || text.rfind("int3", 0) == 0 || text.rfind("int2", 0) == 0) append_unique(list.k, text + ".ef");
  for (const char* format : {"lm4", "lm3", "lm2"})
    for (const char* modifier : {"", ".ef"}) append_unique(list.k, std::string(format) + ".token.g.center.had" + modifier);
  for (const char* format : {"lm4", "lm3", "lm2"}) append_unique(list.v, std::string(format) + ".token.g.had");
}

/// Appends the default list of that name. False if it is none.
bool append_default(const std::string& name, CandidateList& list) {
  if (name == "default" || name == "default-2") {
    append_default_2(list);
  } else if (name == "default-1") {
    append_default_1(list);
  } else {
    return false;
  }
  return true;
}

}  // namespace

kvrt::Scheme parse_scheme(const std::string& text) {
  kvrt::Scheme scheme;
  std::string error;
  if (!kvrt::parse_scheme(text, &scheme, &error))
    fail(kvrt::other_encoding(text).empty() ? ErrorKind::kUsage : ErrorKind::kUnsupported, text, "{}", error);
  return scheme;
}

kvrt::Scheme in_frame_of(kvrt::Scheme scheme, const LayerGeometry& layer) {
  if (!has_rope(layer)) scheme.pre = false;
  return scheme;
}

void check_scheme(const kvrt::Scheme& scheme, const LayerGeometry& layer, Side side) {
  const std::string text = kvrt::to_string(scheme);
  const std::string where = fmt::format("layer {} {} {}", layer.index, side_name(side), text);
  if (const std::string shape = kvrt::check_shape(scheme, layer.head_dim, side == Side::kK); !shape.empty())
    fail(ErrorKind::kUsage, where, "{}", shape);
  if (scheme.pre && !has_rope(layer))
    fail(ErrorKind::kUsage, where, "`pre` needs RoPE, and this layer has none; leave it out (the one frame is post)");
  if (scheme.pair) {
    if (!has_rope(layer)) fail(ErrorKind::kUsage, where, "`pair` needs RoPE, and this layer has none; leave it out");
    const int group = scheme.granularity == kvrt::Granularity::kToken && scheme.group > 0 ? scheme.group : layer.head_dim;
    if (!kvrt::pairs_map_groups(layer.rotary_dim, layer.rope_style == RopeStyle::kInterleaved, layer.head_dim, group))
      fail(ErrorKind::kUsage, where, "RoPE pairs of {} channels do not map groups of {} onto groups; leave `pair` out or use another group", layer.rotary_dim,
           group);
  }
}

std::string doubtful_parts(const kvrt::Scheme& scheme) {
  const bool by_channel = scheme.granularity == kvrt::Granularity::kChannel || scheme.granularity == kvrt::Granularity::kChannelStatic;
  if (scheme.had && by_channel) return "`had` mixes the channels whose ranges are kept apart, and little of either is left; use it with token groups";
  return "";
}

std::string tier_text(double salient_fraction, const std::string& salient) {
  return salient_fraction > 0 ? fmt::format(", salient {:g} at {}", salient_fraction, salient) : "";
}

const std::vector<Preset>& presets() {
  static const std::vector<Preset> list = make_presets();
  return list;
}

const std::vector<NamedOnly>& presets_by_name_only() {
  static const std::vector<NamedOnly> list = {
      {"kvtuner", "one pair per layer, from its own YAML file: kvplan import --from kvtuner FILE --base-model MODEL --mode pertoken|kivi"},
  };
  return list;
}

Preset resolve_preset(const std::string& text, int head_dim, const LogSink& log) {
  if (const Preset* known = find_preset(text)) {
    Preset preset = *known;
    preset.k = fit_group(preset.name, "K", preset.k, head_dim, log);
    preset.v = fit_group(preset.name, "V", preset.v, head_dim, log);
    return preset;
  }
  const std::vector<std::string> sides = split(text, ':');
  if (sides.size() == 2) {
    Preset preset;
    preset.name = text;
    preset.k = kvrt::to_string(parse_scheme(sides[0]));
    preset.v = kvrt::to_string(parse_scheme(sides[1]));
    warn_of_doubtful_parts({preset.k, preset.v}, log);
    return preset;
  }
  kvrt::Scheme scheme;
  std::string error;
  if (sides.size() == 1 && !kvrt::other_encoding(text).empty()) fail(ErrorKind::kUnsupported, text, "{}", kvrt::other_encoding(text));
  if (sides.size() == 1 && kvrt::parse_scheme(text, &scheme, &error))
    fail(ErrorKind::kUsage, text, "one scheme, but K and V are two; write {}:{} for the same on both sides", text, text);
  fail(ErrorKind::kUsage, text, "neither a preset nor KSCHEME:VSCHEME; presets: {}", known_names());
}

CandidateList resolve_candidates(const std::string& text, const LogSink& log) {
  CandidateList list;
  if (append_default(text, list)) {
    list.name = text == "default" ? "default-2" : text;
    return list;
  }
  list.name = "custom";
  std::vector<std::string> given;
  for (const std::string& item : split(text, ',')) {
    if (item.empty()) fail(ErrorKind::kUsage, text, "empty name between commas");
    if (std::find(given.begin(), given.end(), item) != given.end())
      fail(ErrorKind::kUsage, item, "given twice in the candidate list; name each candidate once");
    given.push_back(item);
    if (append_default(item, list)) continue;
    if (item.rfind("target:", 0) == 0) {
      fail(ErrorKind::kUnsupported, item, "this candidate list is not offered in this build; use default, presets or scheme strings");
    } else if (const Preset* preset = find_preset(item)) {
      append_unique(list.k, preset->k);
      append_unique(list.v, preset->v);
      log.note(fmt::format("{}: candidates K {} and V {} (its sinks and window apply to --uniform only)", item, preset->k, preset->v));
    } else if (const std::vector<std::string> sides = split(item, ':'); sides.size() == 2) {
      append_unique(list.k, kvrt::to_string(parse_scheme(sides[0])));
      append_unique(list.v, kvrt::to_string(parse_scheme(sides[1])));
    } else {
      kvrt::Scheme scheme;
      std::string error;
      if (!kvrt::other_encoding(item).empty()) fail(ErrorKind::kUnsupported, item, "{}", kvrt::other_encoding(item));
      if (!kvrt::parse_scheme(item, &scheme, &error))
        fail(ErrorKind::kUsage, item, "not a preset ({}), and as a scheme: {}", known_names(), error);
      const std::string canonical = kvrt::to_string(scheme);
      append_unique(list.k, canonical);
      if (!keys_only(scheme)) append_unique(list.v, canonical);
    }
  }
  std::vector<std::string> all = list.k;
  for (const std::string& text : list.v) append_unique(all, text);
  warn_of_doubtful_parts(all, log);
  return list;
}

}  // namespace calib::quant
