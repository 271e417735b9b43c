// The instances of sm90_conv.cuh going forward: two types x five tiles, and two tiles for dilated inputs.
#ifdef JAXPRIMS_SM90A
#include "conv/sm90_conv.cuh"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t by_tile(const Problem& p, const Sm90Plan& plan, cudaStream_t stream) {
  switch (100 * plan.strided + 10 * plan.mb + plan.nb) {
    case 21: return sm90_conv_launch<T, 2, 1, false, true, 1>(p, plan, stream);
    case 22: return sm90_conv_launch<T, 2, 2, false, true, 1>(p, plan, stream);
    case 23: return sm90_conv_launch<T, 2, 3, false, true, 1>(p, plan, stream);
    case 32: return sm90_conv_launch<T, 3, 2, false, true, 1>(p, plan, stream);
    case 14: return sm90_conv_launch<T, 1, 4, true, true, 1>(p, plan, stream);
    case 122: return sm90_conv_launch<T, 2, 2, false, true, kSm90Phases>(p, plan, stream);
    case 114: return sm90_conv_launch<T, 1, 4, true, true, kSm90Phases>(p, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <class T>
cudaError_t prepare() {
  return first_error({sm90_conv_prepare<T, 2, 1, false, true, 1>(),
                      sm90_conv_prepare<T, 2, 2, false, true, 1>(),
                      sm90_conv_prepare<T, 2, 3, false, true, 1>(),
                      sm90_conv_prepare<T, 3, 2, false, true, 1>(),
                      sm90_conv_prepare<T, 1, 4, true, true, 1>()});
}

}  // namespace

cudaError_t sm90_forward(const Problem& p, const Sm90Plan& plan, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? by_tile<__half>(p, plan, stream) : by_tile<__nv_bfloat16>(p, plan, stream);
}

cudaError_t sm90_prepare_forward() { return first_error({prepare<__half>(), prepare<__nv_bfloat16>()}); }

}  // namespace conv
}  // namespace jaxprims
#endif
