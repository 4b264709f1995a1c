#include "libcalib/text/normalizer.h"

#include <cstdlib>
#include <memory>

#include <utf8proc.h>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

std::string replace_matches(const std::string& text, const ReplaceMatches& step) {
  std::string out;
  out.reserve(text.size());
  std::size_t done = 0;
  while (const auto m = step.pattern.find(text, done)) {
    out.append(text, done, m->begin - done);
    out += step.text;
    done = m->end;
  }
  return out.append(text, done);
}

}  // namespace

std::string compose_nfc(std::string_view text) {
  // No character below U+0300 changes under NFC or combines with one before it.
  bool plain = true;
  for (std::size_t at = 0; at < text.size() && plain;) {
    if (static_cast<unsigned char>(text[at]) < 0x80) { ++at; continue; }
    const Utf8Step step = decode_utf8(text, at);
    plain = step.scalar < 0x300;
    at += step.size;
  }
  if (plain) return std::string(text);
  utf8proc_uint8_t* composed = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &composed,
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  CALIB_CHECK(size >= 0);  // only invalid UTF-8 or lack of memory end here
  return std::string(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size));
}

std::string Normalizer::apply(std::string_view input) const {
  std::string text(input);
  for (const Step& step : steps_) {
    if (const auto* prepend = std::get_if<PrependText>(&step)) {
      if (!text.empty()) text.insert(0, prepend->text);
    } else if (const auto* replace = std::get_if<ReplaceMatches>(&step)) {
      text = replace_matches(text, *replace);
    } else {
      text = compose_nfc(text);
    }
  }
  return text;
}

}  // namespace calib::text
