#pragma once
// SHA-256 (FIPS 180-4): the plan names its tensors by content.

#include <cstddef>
#include <string>

namespace kvrt {

/// 64 lower-case hexadecimal digits.
std::string sha256_hex(const void* data, std::size_t size);

}  // namespace kvrt
