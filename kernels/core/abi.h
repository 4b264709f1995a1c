#pragma once
// The edge between C++ and C: a Status becomes a code and a text, an exception never leaves.

#include <exception>
#include <new>

#include "kernels/core/status.h"
#include "kernels/kvrt.h"

namespace kvrt {

/// Writes status into err (may be null) and returns its code.
kvrt_status report(const Status& status, kvrt_error* err) noexcept;

/// Runs call() -> Status.
template <class Call>
kvrt_status guarded(kvrt_error* err, Call&& call) noexcept {
  try {
    return report(call(), err);
  } catch (const std::bad_alloc&) {
    return report(Status(Code::kInternal, "out of memory"), err);
  } catch (const std::exception& e) {
    return report(Status(Code::kInternal, e.what()), err);
  }
}

}  // namespace kvrt
