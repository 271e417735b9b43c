// The door to the convolution kernels.
#pragma once
#include <cuda_runtime.h>

#include "conv/select.h"

namespace jaxprims {
namespace conv {
cudaError_t launch(const Problem& p, const Config& c, cudaStream_t stream);
}  // namespace conv
}  // namespace jaxprims
