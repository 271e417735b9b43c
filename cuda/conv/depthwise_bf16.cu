// The depthwise kernels of depthwise.cuh (formula, layouts, work and cost are there) for bfloat16.
#include "conv/depthwise.cuh"
#include "conv/depthwise_launch.h"

namespace jaxprims {
namespace conv {
cudaError_t depthwise_bf16(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream) {
  return dw_launch<__nv_bfloat16>(p, d, workspace, stream);
}
}  // namespace conv
}  // namespace jaxprims
