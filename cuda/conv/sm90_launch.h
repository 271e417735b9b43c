// The door to the Hopper kernels.
#pragma once
#include <cuda_runtime.h>

#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

// Whether the current device is of compute capability 9.0, this library has code for it and its driver can encode tensor maps.
// The first call on a device loads all kernels there, so that none is loaded while a graph is recorded.
bool sm90_usable();

// Where sm90_usable() said so. workspace: kSm90Workspace bytes, for the weight gradient alone.
// cudaErrorInvalidValue: the driver refused a tensor map, or a count is past its limit; no result was written.
cudaError_t sm90_launch(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream);

cudaError_t sm90_forward(const Problem& p, const Sm90Plan& plan, cudaStream_t stream);
cudaError_t sm90_input_grad(const Problem& p, const Sm90Plan& plan, cudaStream_t stream);
cudaError_t sm90_weight_grad(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream);

// Let the kernels have their shared memory on the current device.
cudaError_t sm90_prepare_forward();
cudaError_t sm90_prepare_input_grad();
cudaError_t sm90_prepare_weight_grad();

}  // namespace conv
}  // namespace jaxprims
