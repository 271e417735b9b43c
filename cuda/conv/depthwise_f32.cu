// The depthwise kernels of depthwise.cuh (formula, layouts, work and cost are there) for float32.
#include "conv/depthwise.cuh"
#include "conv/depthwise_launch.h"

namespace jaxprims {
namespace conv {
cudaError_t depthwise_f32(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream) {
  return dw_launch<float>(p, d, workspace, stream);
}
}  // namespace conv
}  // namespace jaxprims
