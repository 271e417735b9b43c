// The launches of implicit_gemm.cuh and direct.cuh: three element types x five tiles, the direct kernel, and the sum of the splits.
#include "conv/implicit_gemm.h"

#include "conv/direct.cuh"
#include "conv/implicit_gemm.cuh"
#include "conv/mma_gemm.h"

namespace jaxprims {
namespace conv {
namespace {

template <class T>
cudaError_t launch_blocks(const Args& a, int64_t first, unsigned blocks, cudaStream_t stream) {
  switch (a.c.kernel) {
    case Kernel::kWide: conv_gemm<T, Wide><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kTensor: return sizeof(T) == 4 ? mma_gemm_launch(a, first, blocks, stream) : cudaErrorInvalidValue;
    case Kernel::kMedium: conv_gemm<T, Medium><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kSplit: conv_gemm<T, Split><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kTiny: conv_gemm<T, Tiny><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kNarrow: conv_gemm<T, Narrow><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kDirect: conv_direct<T><<<blocks, 256, 0, stream>>>(a, first); break;
    case Kernel::kSm90: break;  // sm90_launch.h
  }
  return cudaGetLastError();
}

// The workspace holds two results or more and is below 2^31 bytes, so one grid is enough.
template <class T>
void add_splits(const Args& a, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(a.outputs, kAddOutputs));
  conv_add<T><<<blocks, kAddOutputs * kAddThreads, 0, stream>>>(a.workspace, static_cast<T*>(a.p.out_data), a.outputs, a.c.splits);
}

}  // namespace

cudaError_t launch(const Problem& p, const Config& c, void* workspace, cudaStream_t stream) {
  int64_t blocks = 0;
  if (c.splits > 1 && workspace == nullptr) return cudaErrorInvalidValue;
  const Args a = make_args(p, c, workspace, &blocks);
  constexpr int64_t kGrid = int64_t{1} << 30;  // a grid has fewer than 2^31 blocks: more go in further launches
  for (int64_t first = 0; first < blocks; first += kGrid) {
    const unsigned n = static_cast<unsigned>(blocks - first < kGrid ? blocks - first : kGrid);
    cudaError_t e = cudaErrorInvalidValue;
    switch (p.in_type) {
      case Type::kF32: e = launch_blocks<float>(a, first, n, stream); break;
      case Type::kF16: e = launch_blocks<__half>(a, first, n, stream); break;
      case Type::kBF16: e = launch_blocks<__nv_bfloat16>(a, first, n, stream); break;
    }
    if (e != cudaSuccess) return e;
  }
  if (c.splits > 1) {
    switch (p.out_type) {
      case Type::kF32: add_splits<float>(a, stream); break;
      case Type::kF16: add_splits<__half>(a, stream); break;
      case Type::kBF16: add_splits<__nv_bfloat16>(a, stream); break;
    }
  }
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
