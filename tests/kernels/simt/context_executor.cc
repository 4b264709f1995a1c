// The device of all contexts of this program.

#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {
namespace {
const Executor kDevice{Settings{}};
}
}  // namespace kvrt::simt
