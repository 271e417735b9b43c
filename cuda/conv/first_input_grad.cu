// The instances of first_input_grad.cuh: two types x five widths.
#include "conv/first_input_grad.cuh"
#include "conv/first_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t prepare(int bytes) {
  for (const auto kernel : {first::first_input_grad<T, 2>, first::first_input_grad<T, 3>, first::first_input_grad<T, 4>,
                            first::first_input_grad<T, 5>, first::first_input_grad<T, 6>}) {
    const cudaError_t e = first_allow(kernel, bytes);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t first_input_grad_launch(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? first::input_grad<__half>(p, f, stream) : first::input_grad<__nv_bfloat16>(p, f, stream);
}
cudaError_t first_input_grad_prepare(int bytes) {
  const cudaError_t e = prepare<__half>(bytes);
  return e == cudaSuccess ? prepare<__nv_bfloat16>(bytes) : e;
}

}  // namespace conv
}  // namespace jaxprims
