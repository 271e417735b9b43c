// transpose_layout:  y[n, b, a] = x[n, a, b].  NHWC -> NCHW is a = H*W, b = C; NCHW -> NHWC the reverse.
// Layout   both row-major; elements are moved as 1, 2, 4 or 8 byte integers, so any dtype comes through bit by bit.
// Work     a block of 32 x 8 threads moves a 32 x 32 tile through shared memory: rows of x are read and rows of y are
//          written along threadIdx.x. The tile's row of 33 keeps the transposed read free of bank conflicts (4 bytes).
// Cost     reads x once, writes y once. Bound: memory; tiles are partly empty where a or b is below 32.
#include <algorithm>

#include "act/layout.h"

namespace jaxprims {
namespace {

constexpr int kTile = 32, kRows = 8;

template <class T>
__global__ void __launch_bounds__(kTile * kRows) transpose_layout(const T* __restrict__ x, T* __restrict__ y, int64_t n,
                                                                  int64_t a, int64_t b) {
  __shared__ T tile[kTile][kTile + 1];
  const int64_t tiles_a = (a + kTile - 1) / kTile, tiles_b = (b + kTile - 1) / kTile;
  for (int64_t id = blockIdx.x; id < n * tiles_a * tiles_b; id += gridDim.x) {
    const int64_t row = id / tiles_b, image = row / tiles_a;
    const int64_t b0 = (id - row * tiles_b) * kTile, a0 = (row - image * tiles_a) * kTile;
    const T* from = x + image * a * b;
    T* to = y + image * a * b;
    __syncthreads();  // the tile before may still be read
    for (int k = threadIdx.y; k < kTile; k += kRows)
      if (a0 + k < a && b0 + threadIdx.x < b) tile[k][threadIdx.x] = from[(a0 + k) * b + b0 + threadIdx.x];
    __syncthreads();
    for (int k = threadIdx.y; k < kTile; k += kRows)
      if (b0 + k < b && a0 + threadIdx.x < a) to[(b0 + k) * a + a0 + threadIdx.x] = tile[threadIdx.x][k];
  }
}

template <class T>
cudaError_t launch(const void* x, void* y, int64_t n, int64_t a, int64_t b, cudaStream_t stream) {
  const int64_t tiles = n * ((a + kTile - 1) / kTile) * ((b + kTile - 1) / kTile);
  const int grid = static_cast<int>(std::min(tiles, int64_t{1} << 30));
  transpose_layout<T><<<grid, dim3(kTile, kRows), 0, stream>>>(static_cast<const T*>(x), static_cast<T*>(y), n, a, b);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_transpose_layout(const void* x, void* y, int bytes, int64_t n, int64_t a, int64_t b, cudaStream_t stream) {
  if (n == 0 || a == 0 || b == 0) return cudaSuccess;
  switch (bytes) {
    case 1: return launch<uint8_t>(x, y, n, a, b, stream);
    case 2: return launch<uint16_t>(x, y, n, a, b, stream);
    case 4: return launch<uint32_t>(x, y, n, a, b, stream);
    case 8: return launch<uint64_t>(x, y, n, a, b, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxprims
