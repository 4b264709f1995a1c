#include "kernels/core/scheme.h"

#include <array>
#include <charconv>
#include <utility>
#include <vector>

#include "kernels/codec/hadamard_order.h"
#include "kernels/codec/outlier.h"

namespace kvrt {
namespace {

constexpr std::array<std::pair<std::string_view, Format>, 24> kFormats = {{
    {"bf16", Format::kBf16},   {"fp16", Format::kFp16},   {"fp8e4m3", Format::kFp8E4m3}, {"fp8e5m2", Format::kFp8E5m2},
    {"int8", Format::kInt8},   {"int4", Format::kInt4},   {"int3", Format::kInt3},       {"int2", Format::kInt2},
    {"sint8", Format::kSint8}, {"sint4", Format::kSint4}, {"q8_0", Format::kQ8_0},       {"q4_0", Format::kQ4_0},
    {"q4_1", Format::kQ4_1},   {"q5_0", Format::kQ5_0},   {"q5_1", Format::kQ5_1},       {"iq4_nl", Format::kIq4Nl},
    {"nuq4", Format::kNuq4},   {"nuq3", Format::kNuq3},   {"nuq2", Format::kNuq2},       {"lm4", Format::kLm4},
    {"lm3", Format::kLm3},     {"lm2", Format::kLm2},     {"nvfp4", Format::kNvfp4},     {"mxfp4", Format::kMxfp4},
}};

enum class Family { kExact, kFp8, kInt, kSint, kNuq, kLm, kBlock };

Family family(Format f) {
  switch (f) {
    case Format::kBf16: case Format::kFp16: return Family::kExact;
    case Format::kFp8E4m3: case Format::kFp8E5m2: return Family::kFp8;
    case Format::kInt8: case Format::kInt4: case Format::kInt3: case Format::kInt2: return Family::kInt;
    case Format::kSint8: case Format::kSint4: return Family::kSint;
    case Format::kNuq4: case Format::kNuq3: case Format::kNuq2: return Family::kNuq;
    case Format::kLm4: case Format::kLm3: case Format::kLm2: return Family::kLm;
    default: return Family::kBlock;
  }
}

std::string format_name(Format format) {
  for (const auto& [name, value] : kFormats) {
    if (value == format) return std::string(name);
  }
  return "?";
}

/// The modifiers in canonical order, as printed.
std::vector<std::string> modifier_names(const Scheme& s) {
  std::vector<std::string> names;
  if (s.pre) names.emplace_back("pre");
  if (s.center) names.emplace_back("center");
  if (s.smooth) names.emplace_back("smooth");
  if (s.had) names.emplace_back("had");
  if (s.lowrank) names.push_back("lowrank" + std::to_string(s.lowrank));
  if (s.clip) names.emplace_back("clip");
  if (s.outlier_per_mille == 5) names.emplace_back("out0.5");
  if (s.outlier_per_mille == 10) names.emplace_back("out1");
  if (s.outlier_per_mille == 20) names.emplace_back("out2");
  if (s.pair) names.emplace_back("pair");
  if (s.ef) names.emplace_back("ef");
  return names;
}

std::string granularity_name(const Scheme& s) {
  switch (s.granularity) {
    case Granularity::kNone: case Granularity::kBuiltIn: return "";
    case Granularity::kTensor: return "tensor";
    case Granularity::kHead: return "head";
    case Granularity::kToken: return s.group ? "token.g" + std::to_string(s.group) : "token.g";
    case Granularity::kChannel: return "channel.g" + std::to_string(s.group);
    case Granularity::kChannelStatic: return "channel.static";
  }
  return "";
}

/// What a format may be combined with (the table of FORMATS.md 2).
struct Rules {
  bool tensor_head, token, token_whole_only, channel, channel_static;
  std::string_view granularities;
  std::string_view modifiers;  ///< space-separated; "out" and "lowrank" without their numbers
};

Rules rules(Format f) {
  switch (family(f)) {
    case Family::kExact: return {false, false, false, false, false, "no granularity", "pre"};
    case Family::kFp8:
      return {true, true, false, false, false, "tensor, head, token.g<N>", "pre center smooth had lowrank clip"};
    case Family::kInt:
      return {true, true, false, true, true, "tensor, head, token.g<N>, channel.g<N>, channel.static",
              f == Format::kInt8 ? "pre center smooth had lowrank clip out pair" : "pre center smooth had lowrank clip out pair ef"};
    case Family::kSint:
      return {true, true, false, false, false, "tensor, head, token.g<N>",
              f == Format::kSint4 ? "pre center smooth had clip ef" : "pre center smooth had clip"};
    case Family::kNuq:
      return {false, true, true, false, true, "token.g, channel.static", "pre center smooth clip out ef"};
    case Family::kLm: return {false, true, false, false, false, "token.g<N>", "pre center smooth had lowrank ef"};
    case Family::kBlock: return {false, false, false, false, false, "no granularity (it is built in)", "had"};
  }
  return {};
}

bool listed(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t end = list.find(' ');
    if (list.substr(0, end) == word) return true;
    if (end == std::string_view::npos) break;
    list.remove_prefix(end + 1);
  }
  return false;
}

std::string_view without_number(std::string_view part) {
  for (const std::string_view word : {std::string_view("lowrank"), std::string_view("out")}) {
    if (part.substr(0, word.size()) == word) return word;
  }
  return part;
}

/// Empty, or the two parts that do not go together.
std::string contradiction(const Scheme& s) {
  const std::string format = format_name(s.format), granularity = granularity_name(s);
  const Rules r = rules(s.format);
  const auto refuse = [](const std::string& a, const std::string& b, const std::string& hint) {
    return "'" + a + "' does not go with '" + b + "'" + (hint.empty() ? "" : "; " + hint);
  };
  bool fits = false;
  switch (s.granularity) {
    case Granularity::kNone: fits = family(s.format) == Family::kExact; break;
    case Granularity::kBuiltIn: fits = family(s.format) == Family::kBlock; break;
    case Granularity::kTensor: case Granularity::kHead: fits = r.tensor_head; break;
    case Granularity::kToken: fits = r.token && (s.group == 0 || !r.token_whole_only); break;
    case Granularity::kChannel: fits = r.channel; break;
    case Granularity::kChannelStatic: fits = r.channel_static; break;
  }
  if (!fits) return refuse(format, granularity, format + " takes " + std::string(r.granularities));
  const std::vector<std::string> modifiers = modifier_names(s);
  for (const std::string& m : modifiers) {
    if (!listed(r.modifiers, without_number(m))) return refuse(format, m, format + " takes " + std::string(r.modifiers));
  }
  if (s.had && s.pre) return refuse("pre", "had", "a rotation over the head does not commute with RoPE");
  if (s.lowrank) {
    const std::string rank = "lowrank" + std::to_string(s.lowrank);
    if (s.granularity != Granularity::kToken) return refuse(granularity, rank, "lowrank takes token.g<N>");
    for (const std::string& m : modifiers) {
      if (m != rank && m != "pre") return refuse(m, rank, "lowrank takes no other modifier but pre");
    }
  }
  return "";
}

/// Reads a number of 1 to 5 digits without leading zeros that fills `text`.
bool read_count(std::string_view text, int* out) {
  if (text.empty() || text.size() > 5 || text[0] < '1' || text[0] > '9') return false;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return failure == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> split_parts(std::string_view text) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool before_letter = i + 1 == text.size() || !(text[i + 1] >= '0' && text[i + 1] <= '9');
    if (text[i] == '.' && before_letter) parts.push_back(text.substr(begin, i - begin)), begin = i + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

constexpr std::array<std::string_view, 9> kModifierOrder = {"pre", "center", "smooth", "had", "lowrank", "clip", "out", "pair", "ef"};

/// Sets the field of one modifier part; returns its place in the canonical order, -1 if unknown.
int read_modifier(std::string_view part, Scheme* s, std::string* error) {
  const std::string_view word = without_number(part);
  if (word == "lowrank") {
    if (!read_count(part.substr(word.size()), &s->lowrank)) {
      *error = "'" + std::string(part) + "': lowrank needs a rank, for example lowrank32";
      return -1;
    }
    return 4;
  }
  if (word == "out") {
    const std::string_view percent = part.substr(word.size());
    s->outlier_per_mille = percent == "0.5" ? 5 : percent == "1" ? 10 : percent == "2" ? 20 : 0;
    if (s->outlier_per_mille == 0) {
      *error = "'" + std::string(part) + "': the outlier share is out0.5, out1 or out2 (percent)";
      return -1;
    }
    return 6;
  }
  for (int i = 0; i < static_cast<int>(kModifierOrder.size()); ++i) {
    if (part != kModifierOrder[i]) continue;
    bool* const fields[] = {&s->pre, &s->center, &s->smooth, &s->had, nullptr, &s->clip, nullptr, &s->pair, &s->ef};
    *fields[i] = true;
    return i;
  }
  *error = "unknown part '" + std::string(part) + "'; modifiers are pre center smooth had lowrank<r> clip out<p> pair ef";
  return -1;
}

/// Reads the granularity that starts at parts[*next], if one does.
bool read_granularity(const std::vector<std::string_view>& parts, std::size_t* next, Scheme* s, std::string* error) {
  const std::string_view first = *next < parts.size() ? parts[*next] : std::string_view();
  if (first == "tensor" || first == "head") {
    s->granularity = first == "tensor" ? Granularity::kTensor : Granularity::kHead;
    ++*next;
    return true;
  }
  if (first != "token" && first != "channel") return true;
  const std::string_view second = *next + 1 < parts.size() ? parts[*next + 1] : std::string_view();
  const std::string both = std::string(first) + "." + std::string(second);
  *next += 2;
  if (first == "channel" && second == "static") {
    s->granularity = Granularity::kChannelStatic;
    return true;
  }
  s->granularity = first == "token" ? Granularity::kToken : Granularity::kChannel;
  if (first == "token" && second == "g") return true;
  const bool is_group = !second.empty() && second[0] == 'g' && read_count(second.substr(1), &s->group);
  if (first == "token") {
    if (!is_group) *error = "'" + both + "': a token group is token.g<N> with N a divisor of head_dim, or token.g for the whole head";
    return is_group;
  }
  if (!is_group || (s->group != 32 && s->group != 64 && s->group != 128)) {
    *error = "'" + both + "': a channel group is channel.g32, channel.g64, channel.g128 (tokens), or channel.static";
    return false;
  }
  return true;
}

std::string join_sizes(const std::vector<int>& sizes) {
  std::string text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == sizes.size() ? " or " : ", ") + std::to_string(sizes[i]);
  }
  return text;
}

/// Divisors of width worth a scale: from 32 up, or from 8 up in narrower rows, or the row itself.
std::string group_sizes(int width) {
  std::vector<int> sizes;
  for (int n = width >= 64 ? 32 : 8; n <= width; ++n) {
    if (width % n == 0) sizes.push_back(n);
  }
  return sizes.empty() ? std::to_string(width) : join_sizes(sizes);
}

std::string before_rope(Scheme s) {
  s.pre = true;
  return to_string(s);
}

int block_width(Format f) { return f == Format::kNvfp4 ? 16 : 32; }

std::string check_hadamard(const Scheme& s, int head_dim) {
  const std::string dim = "head_dim " + std::to_string(head_dim);
  if (is_llamacpp_block(s.format)) {
    if (head_dim % 64 == 0) return "";
    return "had on " + format_name(s.format) + " rotates blocks of 64 channels, which do not divide " + dim + "; use " +
           format_name(s.format) + " without had";
  }
  if (hadamard_order(head_dim).size != 0) return "";
  return "had: no Hadamard matrix is offered for " + dim +
         " (orders are 2^k and 12, 20, 28, 36, 60 times 2^k, or blocks of 2^k >= 8 that divide it); leave had out";
}

}  // namespace

bool Scheme::operator==(const Scheme& o) const noexcept {
  return format == o.format && granularity == o.granularity && group == o.group && pre == o.pre && center == o.center &&
         smooth == o.smooth && had == o.had && lowrank == o.lowrank && clip == o.clip &&
         outlier_per_mille == o.outlier_per_mille && pair == o.pair && ef == o.ef;
}

int code_bits(Format format) noexcept {
  switch (format) {
    case Format::kBf16: case Format::kFp16: return 16;
    case Format::kFp8E4m3: case Format::kFp8E5m2: case Format::kInt8: case Format::kSint8: case Format::kQ8_0: return 8;
    case Format::kQ5_0: case Format::kQ5_1: return 5;
    case Format::kInt3: case Format::kNuq3: case Format::kLm3: return 3;
    case Format::kInt2: case Format::kNuq2: case Format::kLm2: return 2;
    default: return 4;
  }
}

bool needs_calibration(const Scheme& s) noexcept {
  const Family f = family(s.format);
  return s.granularity == Granularity::kTensor || s.granularity == Granularity::kHead || s.granularity == Granularity::kChannelStatic ||
         s.center || s.smooth || s.lowrank != 0 || s.clip || s.ef || f == Family::kNuq || s.format == Format::kNvfp4;
}

std::string other_encoding(std::string_view text) {
  const std::string format(text.substr(0, text.find('.')));
  if (format == "fp8e4m3fnuz")
    return "'" + format + "' (largest value 240) is another encoding than fp8e4m3 (largest value 448), which this build stores; neither reads as the other";
  if (format == "fp8e5m2fnuz")
    return "'" + format + "' (exponent bias 16) is another encoding than fp8e5m2 (exponent bias 15), which this build stores; neither reads as the other";
  return "";
}

bool parse_scheme(std::string_view text, Scheme* out, std::string* error) {
  *error = other_encoding(text);
  if (!error->empty()) return false;
  const std::vector<std::string_view> parts = split_parts(text);
  Scheme s;
  bool known = false;
  for (const auto& [name, value] : kFormats) {
    if (parts[0] == name) s.format = value, known = true;
  }
  if (!known) {
    *error = "unknown format '" + std::string(parts[0]) + "'; formats are";
    for (const auto& entry : kFormats) *error += " " + std::string(entry.first);
    return false;
  }
  std::size_t next = 1;
  if (!read_granularity(parts, &next, &s, error)) return false;
  if (next == 1) {  // none was given
    const Rules r = rules(s.format);
    if (family(s.format) == Family::kBlock) {
      s.granularity = Granularity::kBuiltIn;
    } else if (family(s.format) != Family::kExact) {
      *error = "'" + std::string(parts[0]) + "' needs a granularity before any modifier: " + std::string(r.granularities);
      if (next < parts.size()) *error += "; got '" + std::string(parts[1]) + "'";
      return false;
    }
  }
  int last = -1;
  std::string_view last_part;
  for (; next < parts.size(); ++next) {
    const std::string_view part = parts[next];
    if (part == "tensor" || part == "head" || part == "token" || part == "channel") {
      *error = "'" + std::string(part) + "': a scheme has one granularity, right after the format '" + std::string(parts[0]) + "'";
      return false;
    }
    const int place = read_modifier(part, &s, error);
    if (place < 0) return false;
    if (place == last) {
      *error = "'" + std::string(last_part) + "' and '" + std::string(part) + "' are the same modifier twice";
      return false;
    }
    if (place < last) {
      *error = "'" + std::string(part) + "' must stand before '" + std::string(last_part) +
               "' (order: pre center smooth had lowrank clip out pair ef)";
      return false;
    }
    last = place;
    last_part = part;
  }
  *error = contradiction(s);
  if (!error->empty()) return false;
  *out = s;
  return true;
}

std::string to_string(const Scheme& s) {
  std::string text = format_name(s.format);
  const std::string granularity = granularity_name(s);
  if (!granularity.empty()) text += "." + granularity;
  for (const std::string& m : modifier_names(s)) text += "." + m;
  return text;
}

std::string check_shape(const Scheme& s, int head_dim, bool is_key) {
  const std::string dim = "head_dim " + std::to_string(head_dim);
  if (head_dim < 1 || head_dim > 65535) return dim + " is outside 1..65535";
  if (!is_key && (s.pre || s.smooth || s.pair)) {
    return std::string("'") + (s.pre ? "pre" : s.smooth ? "smooth" : "pair") + "' is for keys only: values carry no RoPE and meet no query";
  }
  if (s.lowrank && is_key && !s.pre) {
    return "lowrank" + std::to_string(s.lowrank) + " on keys needs 'pre': RoPE turns keys out of any small basis; use " + before_rope(s);
  }
  if (s.lowrank > head_dim) return "lowrank" + std::to_string(s.lowrank) + " is wider than " + dim + "; use a rank of at most " + std::to_string(head_dim);
  const int width = s.lowrank ? s.lowrank : head_dim;
  if (s.granularity == Granularity::kToken && s.group != 0 && width % s.group != 0) {
    return "token.g" + std::to_string(s.group) + " does not divide " + (s.lowrank ? "rank " + std::to_string(width) : dim) + "; use " +
           group_sizes(width);
  }
  if (s.granularity == Granularity::kBuiltIn && head_dim % block_width(s.format) != 0) {
    return format_name(s.format) + " stores blocks of " + std::to_string(block_width(s.format)) + " channels, which do not divide " + dim +
           "; it needs a multiple of " + std::to_string(block_width(s.format));
  }
  if (s.ef && head_dim > kMaxFeedbackDim) return "ef is offered up to head_dim " + std::to_string(kMaxFeedbackDim) + ", got " + dim;
  if (s.outlier_per_mille > 0 && head_dim > kMaxOutlierDim) return "out is offered up to head_dim " + std::to_string(kMaxOutlierDim) + ", got " + dim;
  if (s.pair && head_dim % 2 != 0) return "pair needs an even head_dim, got " + dim;
  return s.had ? check_hadamard(s, head_dim) : "";
}

std::string check_implemented(const Scheme& s) {
  if (s.lowrank > 0) {
    return "modifier 'lowrank" + std::to_string(s.lowrank) +
           "' is not offered by this build, which can only score it; a cache takes pre center smooth had clip out<p> pair ef";
  }
  return "";
}

}  // namespace kvrt
