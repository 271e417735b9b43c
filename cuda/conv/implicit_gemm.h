// The door to the convolution kernels.
#pragma once
#include <cuda_runtime.h>

#include "conv/select.h"

namespace jaxprims {
namespace conv {
// workspace: where c.splits is above 1, that many results in float32.
cudaError_t launch(const Problem& p, const Config& c, void* workspace, cudaStream_t stream);
}  // namespace conv
}  // namespace jaxprims
