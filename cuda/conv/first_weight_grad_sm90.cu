// The instances of first_weight_grad_sm90.cuh: two types x nine tiles.
#ifdef JAXPRIMS_SM90A
#include "conv/first_launch.h"
#include "conv/first_weight_grad_sm90.cuh"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t prepare(int bytes) {
  using namespace first;
  for (const auto kernel : {first_weight_grad_sm90<T, 1, 12>, first_weight_grad_sm90<T, 3, 12>, first_weight_grad_sm90<T, 4, 12>,
                            first_weight_grad_sm90<T, 1, 8>, first_weight_grad_sm90<T, 3, 8>, first_weight_grad_sm90<T, 4, 8>,
                            first_weight_grad_sm90<T, 1, 4>, first_weight_grad_sm90<T, 3, 4>, first_weight_grad_sm90<T, 4, 4>}) {
    const cudaError_t e = first_allow(kernel, bytes);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t first_weight_grad_sm90_launch(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? first::weight_grad_sm90<__half>(p, f, workspace, stream)
                                 : first::weight_grad_sm90<__nv_bfloat16>(p, f, workspace, stream);
}
cudaError_t first_weight_grad_sm90_prepare(int bytes) {
  const cudaError_t e = prepare<__half>(bytes);
  return e == cudaSuccess ? prepare<__nv_bfloat16>(bytes) : e;
}

}  // namespace conv
}  // namespace jaxprims
#endif
