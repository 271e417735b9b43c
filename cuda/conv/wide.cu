// The kernel of large depthwise filters, by element type.
#include "conv/grouped_launch.h"
#include "conv/wide.cuh"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t launch(const Problem& p, const WidePlan& d, cudaStream_t stream) {
  WideArgs a;
  a.p = p, a.d = d, a.tiles_h = d.tiles_h;
  static SharedMemory memory;
  const cudaError_t e = memory.allow(reinterpret_cast<const void*>(wide_kernel<T>), kWideMost);
  if (e != cudaSuccess) return e;  // cudaErrorInvalidValue where a block has less shared memory
  wide_kernel<T><<<static_cast<unsigned>(d.tiles * d.chunks), kWideThreads, d.shared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t wide_launch(const Problem& p, const WidePlan& d, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? launch<__half>(p, d, stream) : launch<__nv_bfloat16>(p, d, stream);
}

}  // namespace conv
}  // namespace jaxprims
