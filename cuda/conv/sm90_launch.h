// The door to the Hopper kernels. workspace: kSm90Workspace bytes, for the weight gradient alone.
#pragma once
#include <cuda_runtime.h>

#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

cudaError_t sm90_forward(const Problem& p, const Sm90Plan& plan, bool flip, cudaStream_t stream);
cudaError_t sm90_input_grad(const Problem& p, const Sm90Plan& plan, bool flip, cudaStream_t stream);
cudaError_t sm90_weight_grad(const Problem& p, const Sm90Plan& plan, bool flip, void* workspace, cudaStream_t stream);

}  // namespace conv
}  // namespace jaxprims
