// The instances of sm90_f32.cuh going forward: TF32 and exact, by tile; and two tiles for phases.
#ifdef JAXPRIMS_SM90A
#include "conv/sm90_f32_launch.h"
#include "conv/sm90_f32_start.cuh"

namespace jaxprims {
namespace conv {

cudaError_t sm90_f32_forward(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  constexpr bool kForward = true;
  switch (10000 * plan.strided + 1000 * plan.cb + plan.n) {
    case 2256: return plan.exact ? cudaErrorInvalidValue : sm90_f32_start<false, kForward, 2, 256, 1>(p, plan, stream);
    case 2192: return plan.exact ? cudaErrorInvalidValue : sm90_f32_start<false, kForward, 2, 192, 1>(p, plan, stream);
    case 2128: return (plan.exact ? sm90_f32_start<true, kForward, 2, 128, 1> : sm90_f32_start<false, kForward, 2, 128, 1>)(p, plan, stream);
    case 1128: return (plan.exact ? sm90_f32_start<true, kForward, 1, 128, 1> : sm90_f32_start<false, kForward, 1, 128, 1>)(p, plan, stream);
    case 12128:
      return (plan.exact ? sm90_f32_start<true, kForward, 2, 128, kSm90Phases> : sm90_f32_start<false, kForward, 2, 128, kSm90Phases>)(p, plan, stream);
    case 11128:
      return (plan.exact ? sm90_f32_start<true, kForward, 1, 128, kSm90Phases> : sm90_f32_start<false, kForward, 1, 128, kSm90Phases>)(p, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t sm90_f32_prepare_forward() {
  constexpr bool kForward = true;
  return first_error({sm90_f32_allow<false, kForward, 2, 256, 1>(), sm90_f32_allow<false, kForward, 2, 192, 1>(),
                      sm90_f32_allow<false, kForward, 2, 128, 1>(),
                      sm90_f32_allow<true, kForward, 2, 128, 1>(), sm90_f32_allow<false, kForward, 1, 128, 1>(),
                      sm90_f32_allow<true, kForward, 1, 128, 1>(), sm90_f32_allow<false, kForward, 2, 128, kSm90Phases>(),
                      sm90_f32_allow<true, kForward, 2, 128, kSm90Phases>(), sm90_f32_allow<false, kForward, 1, 128, kSm90Phases>(),
                      sm90_f32_allow<true, kForward, 1, 128, kSm90Phases>()});
}

}  // namespace conv
}  // namespace jaxprims
#endif
