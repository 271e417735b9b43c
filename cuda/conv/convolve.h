// The door to the convolution kernels: chooses (choose.h) and launches.
#pragma once
#include <cuda_runtime.h>

#include "conv/choose.h"

namespace jaxprims {
namespace conv {

cudaError_t convolve(const Problem& p, void* workspace, int64_t bytes, cudaStream_t stream);

// im2col.cu: the rounds of a plan, each of which convolves its patches.
cudaError_t im2col_launch(const Problem& p, const Im2colPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace conv
}  // namespace jaxprims
