// norm_bwd: with h = dy * act'(z) (z computed again from x, the statistics, bias and residual) and g = h * scale,
//   dx = rstd * (g - (sum g + xhat * sum g xhat) / n) + (cmean + 2 (x - mean) cvar) / n    (the parts / n at counted elements),
//   dscale = sum h xhat, dbias = sum h, dresidual = h; statistics given (`fixed`): dx = rstd g, dmean = -sum rstd g,
//   dvar = -sum rstd^2 g xhat / 2.
//
// Layouts and work: index.h (View, Plan) and kernels.cuh. dscale and dbias are reductions of the same kind over the view in
// which their axes are kept, so the same kernel gathers them, in chunks with a fixed order of merging: no atomics.
// Cost: x and dy twice for dx (the second time from cache where a statistic's elements fit), once more for dscale and dbias.
#include "norm/kernels.cuh"

namespace jaxprims {
namespace norm {

cudaError_t backward(ffi::DataType dtype, const Problem& p, Gather gather, bool then, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch<decltype(t), Gather::kBackward>(p, gather, then, stream); });
}
cudaError_t backward_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream) {
  return with_type(dtype, [&](auto t) { return launch_apply<decltype(t), Gather::kBackward>(p, stream); });
}

}  // namespace norm
}  // namespace jaxprims
