// The weight gradients of row_wgrad.cuh, by element type.
#include "conv/grouped_launch.h"
#include "conv/row_wgrad.cuh"

namespace jaxprims {
namespace conv {
namespace {

cudaError_t start(void (*kernel)(RowWgradArgs), const RowWgradArgs& a, const RowWgradPlan& d, int threads, SharedMemory* memory,
                  cudaStream_t stream) {
  const cudaError_t e = memory->allow(reinterpret_cast<const void*>(kernel), kPairShared);
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(d.blocks()), threads, d.shared, stream>>>(a);
  return cudaGetLastError();
}

template <class T>
cudaError_t by_kind(const Problem& p, const RowWgradPlan& d, float* workspace, cudaStream_t stream) {
  RowWgradArgs a;
  a.p = p, a.d = d, a.segments_log = d.segments_log, a.pitch_x = d.pitch_x, a.pitch_y = d.pitch_y, a.y_at = d.y_at, a.stage = d.stage;
  a.partials = workspace;
  static SharedMemory memory[5];
  cudaError_t e;
  if (d.band && d.R <= 3) e = start(band_wgrad_kernel<T, 3>, a, d, 256, &memory[0], stream);
  else if (d.band && d.R <= 5) e = start(band_wgrad_kernel<T, 5>, a, d, 256, &memory[1], stream);
  else if (d.band) e = start(band_wgrad_kernel<T, 7>, a, d, 256, &memory[2], stream);
  else if (d.depth == 8) e = start(narrow_wgrad_kernel<T, 8>, a, d, 512, &memory[3], stream);
  else e = start(narrow_wgrad_kernel<T, 16>, a, d, 512, &memory[4], stream);
  if (e != cudaSuccess) return e;
  const unsigned blocks = static_cast<unsigned>((p.groups * p.ks + 31) / 32 * p.pixels() * p.ks);
  switch (p.out_type) {
    case Type::kF32: row_wgrad_sum<T, float><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
    case Type::kF16: row_wgrad_sum<T, __half><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
    case Type::kBF16: row_wgrad_sum<T, __nv_bfloat16><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t row_wgrad_launch(const Problem& p, const RowWgradPlan& d, void* workspace, cudaStream_t stream) {
  float* partials = static_cast<float*>(workspace);
  return p.in_type == Type::kF16 ? by_kind<__half>(p, d, partials, stream) : by_kind<__nv_bfloat16>(p, d, partials, stream);
}

}  // namespace conv
}  // namespace jaxprims
