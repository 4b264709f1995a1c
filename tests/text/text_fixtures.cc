#include "tests/text/text_fixtures.h"

#include "libcalib/base/rng.h"

namespace calib::text {

std::string random_words(std::size_t n) {
  Rng rng(3);
  std::string text;
  for (std::size_t word = 0; text.size() < n; ++word) {
    if (word > 0) text += word % 12 == 0 ? '\n' : ' ';
    for (std::uint64_t i = rng.below(7) + 2; i > 0; --i) text += static_cast<char>('a' + rng.below(26));
  }
  text.resize(n);
  return text;
}

}  // namespace calib::text
