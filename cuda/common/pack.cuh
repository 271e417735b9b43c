// Vectors of N elements that move as one load or store, and conversion to and from float.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxprims {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// N consecutive elements of T, aligned to their size: one 2, 4, 8 or 16 byte access.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16, "one access moves at most 16 bytes");
  T v[N];
};

template <class T, int N>
__device__ __forceinline__ void load(float (&dst)[N], const T* src) {
  const Pack<T, N> p = *reinterpret_cast<const Pack<T, N>*>(src);
#pragma unroll
  for (int i = 0; i < N; ++i) dst[i] = to_float(p.v[i]);
}

template <class T, int N>
__device__ __forceinline__ void store(T* dst, const float (&src)[N]) {
  Pack<T, N> p;
#pragma unroll
  for (int i = 0; i < N; ++i) p.v[i] = from_float<T>(src[i]);
  *reinterpret_cast<Pack<T, N>*>(dst) = p;
}

// The widest vector (in elements, at most 16 bytes) with which every row of `row` elements at `data` can be walked.
template <class T>
inline int widest_pack(const void* data, int64_t row) {
  for (int n = static_cast<int>(16 / sizeof(T)); n > 1; n /= 2)
    if (row % n == 0 && reinterpret_cast<uintptr_t>(data) % (n * sizeof(T)) == 0) return n;
  return 1;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxprims
