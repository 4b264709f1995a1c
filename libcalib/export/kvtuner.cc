#include "libcalib/export/kvtuner.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <utility>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"

namespace calib::exports {
namespace {

constexpr int kRoot = 1, kLayer = 2, kHead = 3;  ///< levels of maps

std::string quoted(const std::string& text) {
  constexpr std::size_t kShown = 40;
  return '"' + to_valid_utf8(text.substr(0, kShown)) + (text.size() > kShown ? "…" : "") + '"';
}

/// Plain decimal without sign or leading zeros.
std::optional<int> whole_number(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool plain = error == std::errc() && end == text.data() + text.size() && value >= 0 && std::to_string(value) == text;
  return plain ? std::optional<int>(value) : std::nullopt;
}

/// Events rather than nodes: depth and duplicate keys are seen as they come, and nothing is built.
class Reader : public YAML::EventHandler {
 public:
  Reader(const std::string& where, const std::vector<LayerGeometry>& model) : where_(where), model_(model), layers_(model.size()) {}

  KvtunerBits finish() const {
    std::vector<int> missing;
    for (std::size_t l = 0; l < model_.size(); ++l)
      if (!layers_[l]) missing.push_back(model_[l].index);
    if (!missing.empty())
      fail(ErrorKind::kMismatch, where_, "layer {} is missing: the file ends at line {} with {} of the model's {}", fmt::join(missing, ", "), last_line_,
           counted(model_.size() - missing.size(), "layer"), model_.size());
    KvtunerBits out;
    out.per_head = per_head_.value_or(false);
    for (const std::optional<KvtunerLayer>& layer : layers_) out.layers.push_back(*layer);
    return out;
  }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { wrong(mark, "is an alias; KVTuner's files hold none"); }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    wrong(mark, "is a list, expected " + expected());
  }
  void OnSequenceEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override {
    if (depth_ == 0) return;  // a document of comments: all layers are missing
    // The mark of a value that is not there is that of what stands behind it.
    refuse(ErrorKind::kFormat, at_key_ ? mark.line + 1 : key_line_, "is empty, expected " + expected());
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, const std::string& value) override {
    see(mark);
    // The parser gives plain scalars the tag "?", quoted ones "!".
    if (anchor != YAML::NullAnchor || tag != "?")
      wrong(mark, fmt::format("holds the {} {}, expected {}", tag == "!" ? "string" : "tagged", quoted(value), expected()));
    if (depth_ == 0 || (!at_key_ && (depth_ == kRoot || (depth_ == kLayer && !field_))))
      wrong(mark, fmt::format("holds {}, expected {}", quoted(value), expected()));
    if (at_key_) key(mark, value);
    else width(mark, value);
    at_key_ = !at_key_;
  }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    see(mark);
    if (anchor != YAML::NullAnchor || (tag != "?" && !tag.empty())) wrong(mark, "has an anchor or a tag; KVTuner's files hold none");
    const bool nests = depth_ == 0 || (!at_key_ && (depth_ == kRoot || (depth_ == kLayer && !field_)));
    if (!nests) wrong(mark, "is a map, expected " + expected());
    ++depth_;
    at_key_ = true;
    if (depth_ == kLayer) heads_.clear();
    if (depth_ >= kLayer) k_bits_ = v_bits_ = 0;
  }

  void OnMapEnd() override {
    if (depth_ == kHead) {
      heads_.back().second = complete();
      head_.reset();
    } else if (depth_ == kLayer) {
      finish_layer();
      layer_.reset();
    }
    --depth_;
    at_key_ = true;
  }

 private:
  std::string place() const {
    if (!layer_) return "";
    return fmt::format(", layer {}{}{}", model_[*layer_].index, head_ ? fmt::format(", head {}", *head_) : "", field_ ? fmt::format(", {}", field_) : "");
  }
  std::string expected() const {
    if (depth_ == 0) return "a map of layers: \"0:\" with nbits_key and nbits_value, and so on";
    if (at_key_) return depth_ == kRoot ? "a layer number" : depth_ == kLayer ? "nbits_key, nbits_value or a head number" : "nbits_key or nbits_value";
    return field_ ? "a width of 2, 4 or 8" : "a map with nbits_key and nbits_value";
  }
  [[noreturn]] void refuse(ErrorKind kind, int line, const std::string& what) const { throw Error(kind, where_, fmt::format("line {}{}: {}", line, place(), what)); }
  [[noreturn]] void wrong(const YAML::Mark& mark, const std::string& what) const { refuse(ErrorKind::kFormat, mark.line + 1, what); }
  void see(const YAML::Mark& mark) { last_line_ = mark.line + 1; }

  void key(const YAML::Mark& mark, const std::string& text) {
    key_line_ = mark.line + 1;
    field_ = text == "nbits_key" ? "nbits_key" : text == "nbits_value" ? "nbits_value" : nullptr;
    const std::optional<int> number = whole_number(text);
    const bool fits = depth_ == kRoot ? number.has_value() : field_ || (depth_ == kLayer && number);
    if (!fits) {
      field_ = nullptr;
      wrong(mark, fmt::format("key {} is unknown, expected {}", quoted(text), expected()));
    }
    if (depth_ == kRoot) return layer_key(mark, *number);
    if (depth_ == kHead) return;
    const bool heads = number.has_value();
    if (per_head_ && *per_head_ != heads)
      wrong(mark, fmt::format("key {} gives {}, where the layers before have {}", quoted(text),
                              heads ? "each head its own widths" : "the whole layer its widths", heads ? "one pair each" : "one pair a head"));
    per_head_ = heads;
    if (heads) head_key(mark, *number);
  }

  void layer_key(const YAML::Mark& mark, int number) {
    const auto found = std::find_if(model_.begin(), model_.end(), [&](const LayerGeometry& g) { return g.index == number; });
    if (found == model_.end())
      refuse(ErrorKind::kMismatch, mark.line + 1,
             fmt::format("layer {} has no cache in this model; its {} are {} to {}", number, counted(model_.size(), "layer"), model_.front().index,
                         model_.back().index));
    layer_ = static_cast<std::size_t>(found - model_.begin());
    if (layers_[*layer_]) wrong(mark, "stands there twice");
  }

  void head_key(const YAML::Mark& mark, int number) {
    const int n_heads = model_[*layer_].n_kv_heads;
    if (number >= n_heads)
      refuse(ErrorKind::kMismatch, mark.line + 1, fmt::format("head {} is not in this model, which has {} here", number, counted(n_heads, "KV head")));
    for (const auto& head : heads_)
      if (head.first == number) wrong(mark, fmt::format("head {} stands there twice", number));
    head_ = number;
    heads_.push_back({number, {}});
  }

  void width(const YAML::Mark& mark, const std::string& text) {
    const std::optional<int> bits = whole_number(text);
    if (!bits) wrong(mark, fmt::format("is {}, expected 2, 4 or 8", quoted(text)));
    if (*bits != 2 && *bits != 4 && *bits != 8) refuse(ErrorKind::kUnsupported, mark.line + 1, fmt::format("is {}; KVTuner's widths are 2, 4 and 8 bits", *bits));
    int& slot = std::string_view(field_) == "nbits_key" ? k_bits_ : v_bits_;
    if (slot != 0) wrong(mark, "stands there twice");
    slot = *bits;
    field_ = nullptr;
  }

  KvtunerLayer complete() {
    for (const auto& [bits, name] : {std::pair{k_bits_, "nbits_key"}, std::pair{v_bits_, "nbits_value"}})
      if (bits == 0) refuse(ErrorKind::kFormat, last_line_, fmt::format("{} is missing", name));
    return {std::exchange(k_bits_, 0), std::exchange(v_bits_, 0), false};
  }

  void finish_layer() {
    if (!per_head_.value_or(false)) {
      layers_[*layer_] = complete();
      return;
    }
    const int n_heads = model_[*layer_].n_kv_heads;
    if (static_cast<int>(heads_.size()) != n_heads)
      refuse(ErrorKind::kMismatch, last_line_, fmt::format("holds {}, the model has {} here", counted(heads_.size(), "head"), counted(n_heads, "KV head")));
    KvtunerLayer widest = heads_.front().second;
    for (const auto& [number, bits] : heads_) {
      widest.uneven = widest.uneven || bits.k_bits != heads_.front().second.k_bits || bits.v_bits != heads_.front().second.v_bits;
      widest.k_bits = std::max(widest.k_bits, bits.k_bits);
      widest.v_bits = std::max(widest.v_bits, bits.v_bits);
    }
    layers_[*layer_] = widest;
  }

  const std::string& where_;
  const std::vector<LayerGeometry>& model_;
  std::vector<std::optional<KvtunerLayer>> layers_;
  int depth_ = 0, last_line_ = 1, key_line_ = 1;
  bool at_key_ = false;
  std::optional<bool> per_head_;                        ///< as the first layer has it
  std::optional<std::size_t> layer_;                    ///< present layer, by position
  std::optional<int> head_;
  const char* field_ = nullptr;                         ///< present field
  int k_bits_ = 0, v_bits_ = 0;                         ///< of the present layer or head
  std::vector<std::pair<int, KvtunerLayer>> heads_;     ///< of the present layer
};

void check_size(std::string_view yaml, const std::string& where) {
  if (yaml.size() > kMostKvtunerBytes)
    fail(ErrorKind::kFormat, where, "holds {} bytes; a file of KVTuner holds some hundred a layer, at most {} are read", yaml.size(), kMostKvtunerBytes);
  std::size_t line = 1;
  for (std::size_t begin = 0; begin < yaml.size(); ++line) {
    const std::size_t end = std::min(yaml.find('\n', begin), yaml.size());
    if (end - begin > kMostKvtunerLine) fail(ErrorKind::kFormat, where, "line {} holds {} bytes, at most {} are read", line, end - begin, kMostKvtunerLine);
    begin = end + 1;
  }
}

}  // namespace

KvtunerMode parse_kvtuner_mode(const std::string& option, const std::string& text) {
  for (const KvtunerMode mode : {KvtunerMode::kPerToken, KvtunerMode::kKivi})
    if (text == kvtuner_mode_name(mode)) return mode;
  fail(ErrorKind::kUsage, option, "is \"{}\", expected pertoken or kivi: the file does not say how its widths are meant", to_valid_utf8(text));
}

const char* kvtuner_mode_name(KvtunerMode mode) { return mode == KvtunerMode::kKivi ? "kivi" : "pertoken"; }

double KvtunerBits::mean_bits() const {
  double sum = 0;
  for (const KvtunerLayer& layer : layers) sum += layer.k_bits + layer.v_bits;
  return layers.empty() ? 0.0 : sum / (2.0 * static_cast<double>(layers.size()));
}

std::size_t KvtunerBits::n_uneven() const {
  return static_cast<std::size_t>(std::count_if(layers.begin(), layers.end(), [](const KvtunerLayer& l) { return l.uneven; }));
}

KvtunerBits parse_kvtuner(std::string_view yaml, const std::string& where, const std::vector<LayerGeometry>& model) {
  CALIB_CHECK(!model.empty());
  check_size(yaml, where);
  Reader reader(where, model);
  try {
    std::istringstream stream{std::string(yaml)};
    YAML::Parser parser(stream);
    parser.HandleNextDocument(reader);
    const KvtunerBits bits = reader.finish();
    if (parser.HandleNextDocument(reader)) fail(ErrorKind::kFormat, where, "holds a second document, of which KVTuner would read nothing; leave one");
    return bits;
  } catch (const YAML::Exception& e) {
    fail(ErrorKind::kFormat, where, "{}not YAML: {}", e.mark.is_null() ? "" : fmt::format("line {}, column {}: ", e.mark.line + 1, e.mark.column + 1), e.msg);
  }
}

plan::Plan kvtuner_plan(const ModelIdentity& model, const KvtunerBits& bits, KvtunerMode mode, const plan::Accounting& accounting,
                        const plan::EvidenceByLayer& evidence) {
  CALIB_CHECK(bits.layers.size() == model.layers.size());
  const bool kivi = mode == KvtunerMode::kKivi;
  std::vector<plan::ImportedLayer> layers;
  for (const KvtunerLayer& layer : bits.layers)
    layers.push_back({quant::parse_scheme(fmt::format("int{}.{}", layer.k_bits, kivi ? "channel.g32" : "token.g")),
                      quant::parse_scheme(fmt::format("int{}.token.{}", layer.v_bits, kivi ? "g32" : "g")),
                      fmt::format("KVTuner's file has nbits_key {}, nbits_value {}{}", layer.k_bits, layer.v_bits,
                                  layer.uneven ? ", the widest of heads that differ" : "")});
  return plan::imported_plan(model, std::string("kvtuner ") + kvtuner_mode_name(mode), layers, 0, kivi ? 32 : 0, accounting, evidence);
}

}  // namespace calib::exports
