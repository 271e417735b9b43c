// The instances of first_weight_grad.cuh: two types x three tiles.
#include "conv/first_weight_grad.cuh"
#include "conv/first_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t prepare(int bytes) {
  for (const auto kernel : {first::first_weight_grad<T, 3, 14, 2>, first::first_weight_grad<T, 4, 6, 1>, first::first_weight_grad<T, 2, 8, 1>}) {
    const cudaError_t e = first_allow(kernel, bytes);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t first_weight_grad_launch(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? first::weight_grad<__half>(p, f, workspace, stream)
                                 : first::weight_grad<__nv_bfloat16>(p, f, workspace, stream);
}
cudaError_t first_weight_grad_prepare(int bytes) {
  const cudaError_t e = prepare<__half>(bytes);
  return e == cudaSuccess ? prepare<__nv_bfloat16>(bytes) : e;
}

}  // namespace conv
}  // namespace jaxprims
