#pragma once
// Counts in messages.

#include <concepts>
#include <string>

#include <fmt/format.h>

namespace calib {

/// "1 layer", "2 layers". `noun`: in the singular, with a regular plural.
template <std::integral T>
std::string counted(T n, const char* noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

}  // namespace calib
