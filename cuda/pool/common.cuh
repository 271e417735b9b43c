// What the pool kernels share: taking an item's number apart, loads and stores of places, vector widths.
#pragma once
#include "common/pack.cuh"
#include "pool/params.h"
#include "pool/select.h"

namespace jaxprims::pool {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // per SM: up to 64 registers a thread, or ptxas aims lower and spills

struct Item {
  int64_t image;
  int i0, i1, i2, group;
};

__device__ __forceinline__ Item item_at(const Items& g, int64_t n) {
  Item it;
  uint32_t rest, q;
  if (g.small) {
    g.image.divmod(static_cast<uint32_t>(n), q, rest);
    it.image = q;
  } else {
    it.image = n / g.per_image;
    rest = static_cast<uint32_t>(n - it.image * g.per_image);
  }
  uint32_t r;
  g.group.divmod(rest, q, r);
  it.group = r;
  g.s2.divmod(q, rest, r);
  it.i2 = r;
  g.s1.divmod(rest, q, r);
  it.i1 = r;
  it.i0 = q;
  return it;
}

// Element of channel 0 at a position of an image of spatial extents (.., s1, s2).
__device__ __forceinline__ int element(int i0, int i1, int i2, int s1, int s2, int channels) {
  return ((i0 * s1 + i1) * s2 + i2) * channels;
}

// Images of the two operands of a gather or scatter that belong to an image of the result.
__device__ __forceinline__ void operand_images(const Batch& b, int64_t image, int64_t& data, int64_t& index) {
  data = index = image;
  if (b.axes == 0) return;
  int64_t rest = image / b.inner;
  data = index = image - rest * b.inner;
#pragma unroll
  for (int k = kMaxBatchAxes - 1; k >= 0; --k)
    if (k < b.axes) {
      const int64_t q = rest / b.size[k], at = rest - q * b.size[k];
      data += at * b.data_stride[k];
      index += at * b.index_stride[k];
      rest = q;
    }
}

template <int V>
__device__ __forceinline__ void load_places(uint32_t (&dst)[V], const void* src, int bytes, int64_t at) {
  constexpr int W = V < 4 ? V : 4;
  if (bytes == 1) {
    const auto p = *reinterpret_cast<const Pack<uint8_t, V>*>(static_cast<const uint8_t*>(src) + at);
#pragma unroll
    for (int v = 0; v < V; ++v) dst[v] = p.v[v];
  } else if (bytes == 2) {
    const auto p = *reinterpret_cast<const Pack<uint16_t, V>*>(static_cast<const uint16_t*>(src) + at);
#pragma unroll
    for (int v = 0; v < V; ++v) dst[v] = p.v[v];
  } else {
#pragma unroll
    for (int i = 0; i < V; i += W) {
      const auto p = *reinterpret_cast<const Pack<uint32_t, W>*>(static_cast<const uint32_t*>(src) + at + i);
#pragma unroll
      for (int v = 0; v < W; ++v) dst[i + v] = p.v[v];
    }
  }
}

template <int V>
__device__ __forceinline__ void store_places(void* dst, int bytes, int64_t at, const int (&src)[V]) {
  constexpr int W = V < 4 ? V : 4;
  if (bytes == 1) {
    Pack<uint8_t, V> p;
#pragma unroll
    for (int v = 0; v < V; ++v) p.v[v] = static_cast<uint8_t>(src[v]);
    *reinterpret_cast<Pack<uint8_t, V>*>(static_cast<uint8_t*>(dst) + at) = p;
  } else if (bytes == 2) {
    Pack<uint16_t, V> p;
#pragma unroll
    for (int v = 0; v < V; ++v) p.v[v] = static_cast<uint16_t>(src[v]);
    *reinterpret_cast<Pack<uint16_t, V>*>(static_cast<uint16_t*>(dst) + at) = p;
  } else {
#pragma unroll
    for (int i = 0; i < V; i += W) {
      Pack<int32_t, W> p;
#pragma unroll
      for (int v = 0; v < W; ++v) p.v[v] = src[i + v];
      *reinterpret_cast<Pack<int32_t, W>*>(static_cast<int32_t*>(dst) + at + i) = p;
    }
  }
}

// Calls f(std::integral_constant) with the vector width: 16 bytes of channels where all tensors allow it, else one element.
template <class T, class F>
cudaError_t by_width(int channels, std::initializer_list<const void*> tensors, F&& f) {
  constexpr int V = 16 / sizeof(T);
  bool wide = channels % V == 0;
  for (const void* p : tensors) wide = wide && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  return wide ? f(std::integral_constant<int, V>{}) : f(std::integral_constant<int, 1>{});
}

// Blocks of kThreads for `items` work items; 0 where they are more than one grid can have.
inline unsigned blocks_for(int64_t items) {
  const int64_t n = ceil_div(items, kThreads);
  return n <= INT32_MAX ? static_cast<unsigned>(n) : 0u;
}

}  // namespace jaxprims::pool
