// The depthwise kernels of depthwise.cuh (formula, layouts, work and cost are there) for float16.
#include "conv/depthwise.cuh"
#include "conv/depthwise_launch.h"

namespace jaxprims {
namespace conv {
cudaError_t depthwise_f16(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream) {
  return dw_launch<__half>(p, d, workspace, stream);
}
}  // namespace conv
}  // namespace jaxprims
