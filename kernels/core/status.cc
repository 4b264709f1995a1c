#include "kernels/core/status.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/abi.h"

namespace kvrt {
namespace {

kvrt_status to_c(Code code) noexcept {
  switch (code) {
    case Code::kOk: return KVRT_OK;
    case Code::kArgument: return KVRT_E_ARGUMENT;
    case Code::kIo: return KVRT_E_IO;
    case Code::kFormat: return KVRT_E_FORMAT;
    case Code::kMismatch: return KVRT_E_MISMATCH;
    case Code::kUnsupported: return KVRT_E_UNSUPPORTED;
    case Code::kCapacity: return KVRT_E_CAPACITY;
    case Code::kCuda: return KVRT_E_CUDA;
    case Code::kNumeric: return KVRT_E_NUMERIC;
    case Code::kInternal: return KVRT_E_INTERNAL;
  }
  return KVRT_E_INTERNAL;
}

}  // namespace

kvrt_status report(const Status& status, kvrt_error* err) noexcept {
  const kvrt_status code = to_c(status.code());
  if (err) {
    const std::size_t n = std::min<std::size_t>(status.text().size(), KVRT_ERROR_TEXT - 1);
    err->status = code;
    std::memcpy(err->text, status.text().data(), n);
    err->text[n] = 0;
  }
  return code;
}

}  // namespace kvrt

extern "C" const char* kvrt_status_name(kvrt_status status) {
  switch (status) {
    case KVRT_OK: return "KVRT_OK";
    case KVRT_E_ARGUMENT: return "KVRT_E_ARGUMENT";
    case KVRT_E_IO: return "KVRT_E_IO";
    case KVRT_E_FORMAT: return "KVRT_E_FORMAT";
    case KVRT_E_MISMATCH: return "KVRT_E_MISMATCH";
    case KVRT_E_UNSUPPORTED: return "KVRT_E_UNSUPPORTED";
    case KVRT_E_CAPACITY: return "KVRT_E_CAPACITY";
    case KVRT_E_CUDA: return "KVRT_E_CUDA";
    case KVRT_E_NUMERIC: return "KVRT_E_NUMERIC";
    case KVRT_E_INTERNAL: return "KVRT_E_INTERNAL";
  }
  return "KVRT_E_UNKNOWN";
}

extern "C" const char* kvrt_version(void) { return "0.1.0"; }
