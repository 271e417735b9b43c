// The instances of sm90_wgrad.cuh: two types x six tiles.
#ifdef JAXPRIMS_SM90A
#include "conv/sm90_wgrad.cuh"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t by_tile(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream) {
  switch (100 * plan.swap + 10 * plan.mb + plan.nb) {
    case 24: return sm90_wgrad_launch<T, 2, 4, false>(p, plan, workspace, stream);
    case 23: return sm90_wgrad_launch<T, 2, 3, false>(p, plan, workspace, stream);
    case 14: return sm90_wgrad_launch<T, 1, 4, false>(p, plan, workspace, stream);
    case 13: return sm90_wgrad_launch<T, 1, 3, false>(p, plan, workspace, stream);
    case 124: return sm90_wgrad_launch<T, 2, 4, true>(p, plan, workspace, stream);
    case 114: return sm90_wgrad_launch<T, 1, 4, true>(p, plan, workspace, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <class T>
cudaError_t prepare() {
  return first_error({sm90_wgrad_prepare<T, 2, 4, false>(),
                      sm90_wgrad_prepare<T, 2, 3, false>(),
                      sm90_wgrad_prepare<T, 1, 4, false>(),
                      sm90_wgrad_prepare<T, 1, 3, false>(),
                      sm90_wgrad_prepare<T, 2, 4, true>(),
                      sm90_wgrad_prepare<T, 1, 4, true>()});
}

}  // namespace

cudaError_t sm90_weight_grad(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? by_tile<__half>(p, plan, workspace, stream)
                                 : by_tile<__nv_bfloat16>(p, plan, workspace, stream);
}

cudaError_t sm90_prepare_weight_grad() { return first_error({prepare<__half>(), prepare<__nv_bfloat16>()}); }

}  // namespace conv
}  // namespace jaxprims
#endif
