// What the vector kernels share: 16-byte loads and stores with their cache hints, parameters of a vector, activations.
#pragma once
#include <cstring>

#include "norm/fast.h"
#include "norm/kernels.cuh"

namespace jaxprims {
namespace norm {

template <class T>
constexpr int kVec = 16 / sizeof(T);

template <class T>
using Held = Pack<T, kVec<T>>;

template <class T>
__device__ __forceinline__ Held<T> take_vector(const T* src) {
  const uint4 u = *reinterpret_cast<const uint4*>(src);
  Held<T> h;
  memcpy(&h, &u, 16);
  return h;
}
// For what no later kernel of the call reads: leaves L2 first.
template <class T>
__device__ __forceinline__ Held<T> take_once(const T* src) {
  const uint4 u = __ldcs(reinterpret_cast<const uint4*>(src));
  Held<T> h;
  memcpy(&h, &u, 16);
  return h;
}
template <class T>
__device__ __forceinline__ Held<T> nothing() {
  const uint4 u{0, 0, 0, 0};
  Held<T> h;
  memcpy(&h, &u, 16);
  return h;
}
template <class T>
__device__ __forceinline__ void unpack(const Held<T>& h, float (&v)[kVec<T>]) {
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) v[i] = to_float(h.v[i]);
}
__device__ __forceinline__ uint32_t pair_of(float a, float b, __half) {
  const __half2 h = __floats2half2_rn(a, b);
  uint32_t u;
  memcpy(&u, &h, 4);
  return u;
}
__device__ __forceinline__ uint32_t pair_of(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  uint32_t u;
  memcpy(&u, &h, 4);
  return u;
}
template <class T>
__device__ __forceinline__ void give(T* dst, const float (&v)[kVec<T>]) {
  uint4 u;
  if constexpr (sizeof(T) == 4) {
    u = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
  } else {
    u = {pair_of(v[0], v[1], T{}), pair_of(v[2], v[3], T{}), pair_of(v[4], v[5], T{}), pair_of(v[6], v[7], T{})};
  }
  __stcs(reinterpret_cast<uint4*>(dst), u);
}

// A vector of a parameter in a row kernel; kSimple: kinds 0 and 1 only.
template <class T, bool kSimple = false>
__device__ __forceinline__ void row_values(const Array& a, const RowTerm& t, int64_t base, int j, float otherwise, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  if (t.kind == 0) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = otherwise;
  } else if (kSimple || t.kind == 1) {
    if (sizeof(T) == 4 || a.type == Type::kSame) {
      unpack<T>(take_vector(static_cast<const T*>(a.data) + base + j), v);
    } else {
      const float4* const f = reinterpret_cast<const float4*>(static_cast<const float*>(a.data) + base + j);
#pragma unroll
      for (int i = 0; i < V / 4; ++i) {
        const float4 w = f[i];
        v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
      }
    }
  } else {
    const int64_t place = base + (t.kind == 2 ? t.by.div(static_cast<uint32_t>(j)) : 0u);
    const float w = a.type == Type::kSame ? to_float(static_cast<const T*>(a.data)[place]) : static_cast<const float*>(a.data)[place];
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = w;
  }
}

// act(z) and act'(z) of a vector, for the activations that act_inlined names.
template <int V>
__device__ __forceinline__ void activate(Act a, float (&z)[V]) {
  if (a == Act::kRelu) {
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = z[i] > 0.f || z[i] != z[i] ? z[i] : 0.f;
  } else if (a == Act::kRelu6) {
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = act::clip(z[i], 0.f, 6.f);
  } else if (a == Act::kSilu) {
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = z[i] * act::sigmoid(z[i]);
  }
}
template <int V>
__device__ __forceinline__ void times_slope(Act a, const float (&z)[V], float (&h)[V]) {
  if (a == Act::kRelu) {
#pragma unroll
    for (int i = 0; i < V; ++i) h[i] *= z[i] > 0.f ? 1.f : 0.f;
  } else if (a == Act::kRelu6) {
#pragma unroll
    for (int i = 0; i < V; ++i) h[i] *= z[i] > 0.f && z[i] < 6.f ? 1.f : 0.f;
  } else if (a == Act::kSilu) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float s = act::sigmoid(z[i]);
      h[i] *= s * (1.f + z[i] * (1.f - s));
    }
  }
}

}  // namespace norm
}  // namespace jaxprims
