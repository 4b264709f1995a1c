#include "libcalib/plan/budget.h"

#include <charconv>
#include <cmath>

#include "libcalib/base/error.h"

namespace calib::plan {
namespace {

constexpr double kMaxBytes = 9.0e18;  // below 2^63

double unit_factor(std::string_view unit) {
  if (unit == "B") return 1;
  if (unit == "kB") return 1e3;
  if (unit == "MB") return 1e6;
  if (unit == "GB") return 1e9;
  if (unit == "TB") return 1e12;
  if (unit == "KiB") return 0x1p10;
  if (unit == "MiB") return 0x1p20;
  if (unit == "GiB") return 0x1p30;
  if (unit == "TiB") return 0x1p40;
  return 0;
}

/// Leading number of `text`; `rest` is what follows. False if there is none.
bool leading_number(std::string_view text, double* value, std::string_view* rest) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error != std::errc()) return false;
  *rest = text.substr(static_cast<std::size_t>(end - text.data()));
  return std::isfinite(*value);
}

}  // namespace

Budget parse_budget(const std::string& text) {
  constexpr const char* kExpected =
      "expected effective bits (4.5), bytes for the whole context (12GiB; units B kB MB GB TB KiB MiB GiB TiB) or bytes per "
      "token (300B/token)";
  Budget budget;
  budget.text = text;
  std::string_view rest;
  if (!leading_number(text, &budget.value, &rest) || !(budget.value > 0))
    fail(ErrorKind::kUsage, "--budget " + text, "not a number > 0 with a known unit; {}", kExpected);
  if (rest.empty()) {
    if (budget.value > 64) fail(ErrorKind::kUsage, "--budget " + text, "more than 64 effective bits; {}", kExpected);
    return budget;
  }
  budget.kind = Budget::Kind::kBytes;
  if (constexpr std::string_view kPerToken = "/token"; rest.size() > kPerToken.size() && rest.substr(rest.size() - kPerToken.size()) == kPerToken) {
    budget.kind = Budget::Kind::kBytesPerToken;
    rest.remove_suffix(kPerToken.size());
  }
  const double factor = unit_factor(rest);
  if (factor == 0) fail(ErrorKind::kUsage, "--budget " + text, "unknown unit `{}`; {}", rest, kExpected);
  budget.value *= factor;
  if (budget.value > kMaxBytes) fail(ErrorKind::kUsage, "--budget " + text, "more bytes than can be counted");
  return budget;
}

double parse_above(double low, std::string_view text, const std::string& option, const char* example) {
  double value = 0;
  std::string_view rest;
  if (!leading_number(text, &value, &rest) || !rest.empty() || !(value > low))
    fail(ErrorKind::kUsage, option + " " + std::string(text), "expected a number above {}, such as {}", low, example);
  return value;
}

std::string rounded_up(double value) {
  if (!(value > 0)) return "0";
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 2);
  std::string text;
  // A decimal form may read back just below the value: the next one does not.
  for (double steps = std::floor(value / unit);; ++steps) {
    text = fmt::format("{:.3g}", steps * unit);
    double back = 0;
    std::from_chars(text.data(), text.data() + text.size(), back);
    if (back >= value) return text;
  }
}

std::string bits_that_allow(std::int64_t bytes, std::int64_t elements) {
  for (double hundredths = std::floor(800.0 * static_cast<double>(bytes) / static_cast<double>(elements));; ++hundredths) {
    std::string text = fmt::format("{:.2f}", hundredths / 100);
    double bits = 0;
    std::from_chars(text.data(), text.data() + text.size(), bits);
    if (budget_bytes({Budget::Kind::kEffectiveBits, bits, text}, elements, 1, 1) >= bytes) return text;
  }
}

std::int64_t budget_bytes(const Budget& budget, std::int64_t elements, std::int64_t context_tokens, std::int64_t batch) {
  double bytes = budget.value;
  if (budget.kind == Budget::Kind::kEffectiveBits) bytes = budget.value * static_cast<double>(elements) / 8;
  if (budget.kind == Budget::Kind::kBytesPerToken)
    bytes = budget.value * static_cast<double>(context_tokens) * static_cast<double>(batch);
  if (!(bytes < kMaxBytes)) fail(ErrorKind::kUsage, "--budget " + budget.text, "more bytes than can be counted");
  // Effective bits that were printed and typed back in must give the same count: forgive the rounding of the decimal form.
  const double nearest = std::nearbyint(bytes);
  if (std::fabs(bytes - nearest) <= std::max(1e-6, bytes * 4e-16)) return static_cast<std::int64_t>(nearest);
  return static_cast<std::int64_t>(std::floor(bytes));
}

std::string format_bytes(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace calib::plan
