// norm_jvp:  yd = act'(z) * (scale * rstd * (xd - m1 - xhat * m2) + scaled * xhat + biasd + residuald),
//   m1 = mean(xd), m2 = mean(xhat * xd) over the statistic's elements; statistics given (`fixed`): m1 = meand,
//   m2 = rstd * vard / 2. Also tmean = m1 and tvar = 2 mean((x - mean) * xd).
//
// Layouts and work: index.h (View, Plan) and kernels.cuh. Cost: x and xd twice (then from cache), yd once.
#include "norm/kernels.cuh"

namespace jaxprims {
namespace norm {

cudaError_t tangent(ffi::DataType dtype, const Problem& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch<decltype(t), Gather::kTangent>(p, Gather::kTangent, true, stream); });
}
cudaError_t tangent_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch_apply<decltype(t), Gather::kTangent>(p, stream); });
}

}  // namespace norm
}  // namespace jaxprims
