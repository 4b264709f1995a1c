#pragma once
// SHA-256 (OpenSSL) as lower-case hex.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace calib {

/// Incremental SHA-256. Usage: Sha256 h; h.update(p, n); h.hex().
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* data, std::size_t size);
  void update(std::string_view text) { update(text.data(), text.size()); }
  /// 64 hex digits of everything so far; ends the computation.
  std::string hex();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::string sha256_hex(std::string_view bytes);

/// Throws: kNotFound, kIo naming the path.
std::string sha256_of_file(const std::string& path);

}  // namespace calib
