// The instances of sm90_f32.cuh for the input gradient.
#ifdef JAXPRIMS_SM90A
#include "conv/sm90_f32_launch.h"
#include "conv/sm90_f32_start.cuh"

namespace jaxprims {
namespace conv {

cudaError_t sm90_f32_input_grad(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  return sm90_f32_by_tile<false>(p, plan, stream);
}

cudaError_t sm90_f32_prepare_input_grad() { return sm90_f32_prepare<false>(); }

}  // namespace conv
}  // namespace jaxprims
#endif
