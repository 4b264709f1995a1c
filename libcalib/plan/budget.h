#pragma once
// Budgets as users write them: `4.5` (effective bits), `12GiB` (context x batch), `300B/token`.

#include <cstdint>
#include <string>
#include <string_view>

namespace calib::plan {

struct Budget {
  enum class Kind { kEffectiveBits, kBytes, kBytesPerToken };
  Kind kind = Kind::kEffectiveBits;
  double value = 0;   ///< bits, bytes, or bytes per token of one sequence
  std::string text;   ///< as given
};

/// Units: B kB MB GB TB (powers of 1000), KiB MiB GiB TiB (powers of 1024), each alone or followed by `/token`.
/// Throws kUsage naming the text. Independent of the locale: `4,5` is an error.
Budget parse_budget(const std::string& text);

/// A plain decimal number above `low`, the whole text. Throws kUsage naming `option` and `example`, a value that would do.
double parse_above(double low, std::string_view text, const std::string& option, const char* example);

/// `value` with three significant digits, never below it: a bound that is typed back in is met. "0" for 0.
std::string rounded_up(double value);
/// Effective bits with two decimals that allow `bytes` for `elements`, as budget_bytes() counts.
std::string bits_that_allow(std::int64_t bytes, std::int64_t elements);

/// The largest byte count within the budget for `elements` K and V elements and context x batch tokens.
std::int64_t budget_bytes(const Budget& budget, std::int64_t elements, std::int64_t context_tokens, std::int64_t batch);

/// "189.3 MiB".
std::string format_bytes(std::int64_t bytes);

}  // namespace calib::plan
