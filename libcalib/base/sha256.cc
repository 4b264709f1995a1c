#include "libcalib/base/sha256.h"

#include <openssl/evp.h>

#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"

namespace calib {

struct Sha256::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  CALIB_CHECK(EVP_DigestInit_ex(impl_->context, EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* data, std::size_t size) {
  CALIB_CHECK(EVP_DigestUpdate(impl_->context, data, size) == 1);
}

std::string Sha256::hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  CALIB_CHECK(EVP_DigestFinal_ex(impl_->context, digest, &size) == 1);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256_hex(std::string_view bytes) {
  Sha256 h;
  h.update(bytes);
  return h.hex();
}

std::string sha256_of_file(const std::string& path) {
  MappedFile file(path);
  Sha256 h;
  constexpr std::size_t kStep = std::size_t{8} << 20;
  for (std::size_t at = 0; at < file.size(); at += kStep) {
    const auto part = file.bytes().substr(at, kStep);
    h.update(part);
    file.release(at, part.size());
  }
  return h.hex();
}

}  // namespace calib
