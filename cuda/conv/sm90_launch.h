// The door to the Hopper kernels.
#pragma once
#include <cuda_runtime.h>

#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

// Whether the current device is of compute capability 9.0, this library has code for it and its driver can encode tensor maps.
bool sm90_usable();

// workspace: kSm90Workspace bytes, for the weight gradient alone.
cudaError_t sm90_launch(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream);

cudaError_t sm90_forward(const Problem& p, const Sm90Plan& plan, cudaStream_t stream);
cudaError_t sm90_input_grad(const Problem& p, const Sm90Plan& plan, cudaStream_t stream);
cudaError_t sm90_weight_grad(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream);

}  // namespace conv
}  // namespace jaxprims
