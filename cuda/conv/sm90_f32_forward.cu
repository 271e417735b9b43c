// The instances of sm90_f32.cuh going forward.
#ifdef JAXPRIMS_SM90A
#include "conv/sm90_f32_launch.h"
#include "conv/sm90_f32_start.cuh"

namespace jaxprims {
namespace conv {

cudaError_t sm90_f32_forward(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  return sm90_f32_by_tile<true>(p, plan, stream);
}

cudaError_t sm90_f32_prepare_forward() { return sm90_f32_prepare<true>(); }

}  // namespace conv
}  // namespace jaxprims
#endif
