// The options of convolution as they come from Python: one struct for conv, conv_fused, conv_dx and conv_dw.
//
//   y[p] = sum over r of x[(p*stride + r*rhs_dilation - padding_low) / lhs_dilation] * w[r]   per spatial axis, where the
//   division is exact and in range; flip = 1 reverses the taps. A spec is a lax dimension number: the positions of
//   (N, C, spatial..), (K, C, spatial..), (N, K, spatial..) in the array without its true-batch axis, which is the first.
//
// What the kernels take: spatial rank 1 to 3; operands of one type, float32, float16 or bfloat16, and a result of any of
// the three; every extent of N, C, K and every product of an array's spatial extents at most 2^31 - 1024; per spatial axis
// extents, strides and dilations below 2^30 and  max((P-1)*stride, (H-1)*lhs_dilation) + (R-1)*rhs_dilation + |padding_low|
// below 2^30. Arrays and batch * pixels may pass 2^31 elements. Zero-size arrays are taken: an empty sum is zero.
#pragma once
#include "common/ffi.h"

namespace jaxprims {

struct ConvConfig {
  Ints lhs_spec, rhs_spec, out_spec;
  Ints strides, padding_low, lhs_dilation, rhs_dilation;
  int64_t flip, groups, batch_groups;
  int64_t x_batched, w_batched, y_batched;
  int64_t activation, has_bias, has_residual;  // conv_fused; bias (K,) or (B, K), residual as y
  int64_t bias_batched, residual_batched;
  int64_t algorithm;  // 0 auto, 1 implicit_gemm, 2 direct, 3 gemm
  int64_t tf32;       // float32 operands may be rounded to TF32; 0: float32 throughout
};

}  // namespace jaxprims

JAXPRIMS_CONFIG(::jaxprims::ConvConfig, FIELD(::jaxprims::Ints, lhs_spec), FIELD(::jaxprims::Ints, rhs_spec),
                FIELD(::jaxprims::Ints, out_spec), FIELD(::jaxprims::Ints, strides), FIELD(::jaxprims::Ints, padding_low),
                FIELD(::jaxprims::Ints, lhs_dilation), FIELD(::jaxprims::Ints, rhs_dilation), FIELD(int64_t, flip),
                FIELD(int64_t, groups), FIELD(int64_t, batch_groups), FIELD(int64_t, x_batched), FIELD(int64_t, w_batched),
                FIELD(int64_t, y_batched), FIELD(int64_t, activation), FIELD(int64_t, has_bias), FIELD(int64_t, has_residual),
                FIELD(int64_t, bias_batched), FIELD(int64_t, residual_batched),
                FIELD(int64_t, algorithm), FIELD(int64_t, tf32));
