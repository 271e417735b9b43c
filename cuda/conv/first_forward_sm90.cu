// The instances of first_forward_sm90.cuh: two types x two widths.
#ifdef JAXPRIMS_SM90A
#include "conv/first_forward_sm90.cuh"
#include "conv/first_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t prepare(int bytes) {
  const cudaError_t e = first_allow(first::first_forward_sm90<T, 12>, bytes);
  return e == cudaSuccess ? first_allow(first::first_forward_sm90<T, 8>, bytes) : e;
}

}  // namespace

cudaError_t first_forward_sm90_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? first::forward_sm90<__half>(p, f, stream) : first::forward_sm90<__nv_bfloat16>(p, f, stream);
}
cudaError_t first_forward_sm90_prepare(int bytes) {
  const cudaError_t e = prepare<__half>(bytes);
  return e == cudaSuccess ? prepare<__nv_bfloat16>(bytes) : e;
}

}  // namespace conv
}  // namespace jaxprims
#endif
