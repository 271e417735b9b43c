// norm, norm_stats, norm_apply:  y = act((x - mean) * rstd * scale + bias + residual),  rstd = 1 / sqrt(var + eps).
//
// Layouts and work: index.h (View, Plan) and kernels.cuh. Batch norm NHWC is the view [1, NHW, C, 1] (columns), NCHW
// [1, N, C, HW]; layer norm over the last axis [M, C, 1, 1] (rows); group norm NHWC [N, HW, G, C/G].
// Cost: x twice (the second time from cache where a statistic's elements fit), y once.
#include "norm/kernels.cuh"

namespace jaxprims {
namespace norm {

cudaError_t forward(ffi::DataType dtype, const Problem& p, bool then, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch<decltype(t), Gather::kMoments>(p, Gather::kMoments, then, stream); });
}
cudaError_t forward_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch_apply<decltype(t), Gather::kMoments>(p, stream); });
}

}  // namespace norm
}  // namespace jaxprims
