// The door to the Hopper kernels for float32.
#pragma once
#include <cuda_runtime.h>

#include "conv/sm90_f32.h"

namespace jaxprims {
namespace conv {

// As sm90_usable() (sm90_launch.h), and these kernels are loaded too.
bool sm90_f32_usable();

// Where sm90_f32_usable() said so. cudaErrorInvalidValue: the driver refused a tensor map, or a count is past its limit; no result
// was written.
cudaError_t sm90_f32_launch(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream);

cudaError_t sm90_f32_forward(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream);
cudaError_t sm90_f32_input_grad(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream);

// Let the kernels have their shared memory on the current device.
cudaError_t sm90_f32_prepare_forward();
cudaError_t sm90_f32_prepare_input_grad();

}  // namespace conv
}  // namespace jaxprims
