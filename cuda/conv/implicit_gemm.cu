// The launches of implicit_gemm.cuh: three element types x five tiles, and the direct kernel.
#include "conv/implicit_gemm.h"

#include "conv/implicit_gemm.cuh"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
void launch_blocks(const Args& a, int64_t first, unsigned blocks, cudaStream_t stream) {
  switch (a.c.kernel) {
    case Kernel::kWide: conv_gemm<T, Wide><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kMedium: conv_gemm<T, Medium><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kSplit: conv_gemm<T, Split><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kTiny: conv_gemm<T, Tiny><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kNarrow: conv_gemm<T, Narrow><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kDirect: conv_direct<T><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kSm90: break;  // sm90_launch.h
  }
}

}  // namespace

cudaError_t launch(const Problem& p, const Config& c, cudaStream_t stream) {
  int64_t blocks = 0;
  const Args a = make_args(p, c, &blocks);
  constexpr int64_t kGrid = int64_t{1} << 30;  // a grid has fewer than 2^31 blocks: more go in further launches
  for (int64_t first = 0; first < blocks; first += kGrid) {
    const unsigned n = static_cast<unsigned>(blocks - first < kGrid ? blocks - first : kGrid);
    switch (p.in_type) {
      case Type::kF32: launch_blocks<float>(a, first, n, stream); break;
      case Type::kF16: launch_blocks<__half>(a, first, n, stream); break;
      case Type::kBF16: launch_blocks<__nv_bfloat16>(a, first, n, stream); break;
    }
    const cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess) return e;
  }
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
