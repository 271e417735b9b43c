// The door to the first-layer kernels; one file per op has the instances.
#pragma once
#include <cuda_runtime.h>

#include "conv/first.h"

namespace jaxprims {
namespace conv {

bool first_usable();  // whether the GPU gives a block the shared memory that plans count on; prepares the kernels, once
cudaError_t first_launch(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream);

cudaError_t first_forward_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream);
cudaError_t first_input_grad_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream);
cudaError_t first_weight_grad_launch(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream);
cudaError_t first_forward_prepare(int bytes);
cudaError_t first_forward_sm90_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream);
cudaError_t first_forward_sm90_prepare(int bytes);
cudaError_t first_input_grad_prepare(int bytes);
cudaError_t first_weight_grad_prepare(int bytes);

// Dynamic shared memory of a kernel.
template <class Kernel>
cudaError_t first_allow(Kernel* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace conv
}  // namespace jaxprims
