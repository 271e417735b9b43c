// The door to the depthwise kernels; one function per element type, each in a file of its own.
#pragma once
#include <cuda_runtime.h>

#include "conv/depthwise.h"

namespace jaxprims {
namespace conv {

cudaError_t depthwise_f32(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream);
cudaError_t depthwise_f16(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream);
cudaError_t depthwise_bf16(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream);

// workspace: dw_workspace() bytes, of the weight gradient alone.
inline cudaError_t depthwise_launch(const Problem& p, const DwPlan& d, void* workspace, cudaStream_t stream) {
  float* partials = static_cast<float*>(workspace);
  switch (p.in_type) {
    case Type::kF32: return depthwise_f32(p, d, partials, stream);
    case Type::kF16: return depthwise_f16(p, d, partials, stream);
    case Type::kBF16: return depthwise_bf16(p, d, partials, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace conv
}  // namespace jaxprims
