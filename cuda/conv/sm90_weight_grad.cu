// The instances of sm90_wgrad.cuh: two types x five tiles.
#include "conv/sm90_wgrad.cuh"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t by_tile(const Problem& p, const Sm90Plan& plan, bool flip, void* workspace, cudaStream_t stream) {
  switch (10 * plan.mb + plan.nb) {
    case 21: return sm90_wgrad_launch<T, 2, 1>(p, plan, flip, workspace, stream);
    case 22: return sm90_wgrad_launch<T, 2, 2>(p, plan, flip, workspace, stream);
    case 23: return sm90_wgrad_launch<T, 2, 3>(p, plan, flip, workspace, stream);
    case 31: return sm90_wgrad_launch<T, 3, 1>(p, plan, flip, workspace, stream);
    case 32: return sm90_wgrad_launch<T, 3, 2>(p, plan, flip, workspace, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t sm90_weight_grad(const Problem& p, const Sm90Plan& plan, bool flip, void* workspace, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? by_tile<__half>(p, plan, flip, workspace, stream)
                                 : by_tile<__nv_bfloat16>(p, plan, flip, workspace, stream);
}

}  // namespace conv
}  // namespace jaxprims
