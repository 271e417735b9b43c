// The grouped tensor-core kernels, by element type and input channels of a unit.
#include "conv/narrow.cuh"
#include "conv/grouped_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T, int Depth>
cudaError_t launch(const NarrowArgs& a, const NarrowPlan& d, cudaStream_t stream) {
  static SharedMemory memory;
  const cudaError_t e = memory.allow(reinterpret_cast<const void*>(narrow_kernel<T, Depth>), kNarrowMost);
  if (e != cudaSuccess) return e;
  narrow_kernel<T, Depth><<<static_cast<unsigned>(d.blocks()), kNarrowThreads, d.shared, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t by_depth(const Problem& p, const NarrowPlan& d, cudaStream_t stream) {
  NarrowArgs a;
  a.p = p, a.d = d, a.stage = d.stage;
  return d.depth == 8 ? launch<T, 8>(a, d, stream) : launch<T, 16>(a, d, stream);
}

}  // namespace

cudaError_t narrow_launch(const Problem& p, const NarrowPlan& d, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? by_depth<__half>(p, d, stream) : by_depth<__nv_bfloat16>(p, d, stream);
}

}  // namespace conv
}  // namespace jaxprims
