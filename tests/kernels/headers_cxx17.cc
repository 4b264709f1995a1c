// Compiled as C++17: the headers that CUDA 12.4 code includes must not need more.

#include "kernels/codec/codebook.h"
#include "kernels/codec/fp4_codec.h"
#include "kernels/codec/fp8_codec.h"
#include "kernels/codec/grid_codec.h"
#include "kernels/codec/group_range.h"
#include "kernels/codec/hadamard.h"
#include "kernels/codec/half.h"
#include "kernels/codec/int_codec.h"
#include "kernels/codec/llamacpp_blocks.h"
#include "kernels/codec/low_rank.h"
#include "kernels/codec/outlier.h"
#include "kernels/codec/page_codec.h"
#include "kernels/codec/range.h"
#include "kernels/codec/static_range.h"
#include "kernels/core/layout.h"
#include "kernels/core/status.h"
#include "kernels/core/tiers.h"
#include "kernels/write/fake_quant.h"

static_assert(__cplusplus < 202002L, "this file is compiled as C++17");
