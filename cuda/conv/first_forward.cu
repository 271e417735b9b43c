// The instances of first_forward.cuh: two types x three widths.
#include "conv/first_forward.cuh"
#include "conv/first_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t prepare(int bytes) {
  cudaError_t e = first_allow(first::first_forward<T, 12>, bytes);
  if (e == cudaSuccess) e = first_allow(first::first_forward<T, 8>, bytes);
  return e == cudaSuccess ? first_allow(first::first_forward<T, 4>, bytes) : e;
}

}  // namespace

cudaError_t first_forward_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? first::forward<__half>(p, f, stream) : first::forward<__nv_bfloat16>(p, f, stream);
}
cudaError_t first_forward_prepare(int bytes) {
  const cudaError_t e = prepare<__half>(bytes);
  return e == cudaSuccess ? prepare<__nv_bfloat16>(bytes) : e;
}

}  // namespace conv
}  // namespace jaxprims
