// The depthwise tensor-core kernels, by element type and tap rows.
#include "conv/band.cuh"
#include "conv/grouped_launch.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T, int R>
cudaError_t launch(const BandArgs& a, const BandPlan& d, cudaStream_t stream) {
  static SharedMemory memory;
  const cudaError_t e = memory.allow(reinterpret_cast<const void*>(band_kernel<T, R>), kBandMost);
  if (e != cudaSuccess) return e;
  band_kernel<T, R><<<static_cast<unsigned>(d.blocks()), kBandThreads, d.shared, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t by_rows(const Problem& p, const BandPlan& d, cudaStream_t stream) {
  BandArgs a;
  a.p = p, a.d = d, a.segments_log = d.segments_log, a.pitch = d.pitch, a.stage = d.stage;
  if (d.R <= 5) return launch<T, 5>(a, d, stream);
  return launch<T, 7>(a, d, stream);
}

}  // namespace

cudaError_t band_launch(const Problem& p, const BandPlan& d, cudaStream_t stream) {
  return p.in_type == Type::kF16 ? by_rows<__half>(p, d, stream) : by_rows<__nv_bfloat16>(p, d, stream);
}

}  // namespace conv
}  // namespace jaxprims
