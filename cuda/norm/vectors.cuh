// 16-byte vectors that stay packed in four registers until they are used (as eight 16-bit values they would take eight).
#pragma once
#include "norm/fast.cuh"

namespace jaxprims {
namespace norm {

__device__ __forceinline__ uint4 load16(const void* src) { return *static_cast<const uint4*>(src); }
// For what no later kernel of the call reads: leaves L2 first.
__device__ __forceinline__ uint4 load16_once(const void* src) { return __ldcs(static_cast<const uint4*>(src)); }

__device__ __forceinline__ void widen(uint32_t u, float& a, float& b, __nv_bfloat16) {
  a = __uint_as_float(u << 16);
  b = __uint_as_float(u & 0xffff0000u);
}
__device__ __forceinline__ void widen(uint32_t u, float& a, float& b, __half) {
  __half2 h;
  memcpy(&h, &u, 4);
  const float2 f = __half22float2(h);
  a = f.x, b = f.y;
}
template <class T>
__device__ __forceinline__ void widen(const uint4& u, float (&v)[kVec<T>]) {
  if constexpr (sizeof(T) == 4) {
    v[0] = __uint_as_float(u.x), v[1] = __uint_as_float(u.y), v[2] = __uint_as_float(u.z), v[3] = __uint_as_float(u.w);
  } else {
    widen(u.x, v[0], v[1], T{}), widen(u.y, v[2], v[3], T{}), widen(u.z, v[4], v[5], T{}), widen(u.w, v[6], v[7], T{});
  }
}

// The same of V elements: a vector of 16 bytes, or one element where rows are not of whole vectors.
template <int V>
struct Packed {
  uint4 u;
  template <class T>
  static __device__ __forceinline__ Packed take(const T* src) { return {load16(src)}; }
  template <class T>
  static __device__ __forceinline__ Packed take_once(const T* src) { return {load16_once(src)}; }
};
template <>
struct Packed<1> {
  uint32_t u;
  static __device__ __forceinline__ Packed take(const float* src) { return {__float_as_uint(*src)}; }
  static __device__ __forceinline__ Packed take_once(const float* src) { return {__float_as_uint(__ldcs(src))}; }
  template <class T>
  static __device__ __forceinline__ Packed take(const T* src) { return {*reinterpret_cast<const unsigned short*>(src)}; }
  template <class T>
  static __device__ __forceinline__ Packed take_once(const T* src) { return {__ldcs(reinterpret_cast<const unsigned short*>(src))}; }
};
template <class T, int V>
__device__ __forceinline__ void widen(const Packed<V>& h, float (&v)[V]) {
  if constexpr (V > 1) {
    widen<T>(h.u, v);
  } else if constexpr (sizeof(T) == 4) {
    v[0] = __uint_as_float(h.u);
  } else {
    T one;
    const auto bits = static_cast<unsigned short>(h.u);
    memcpy(&one, &bits, 2);
    v[0] = to_float(one);
  }
}
template <class T>
__device__ __forceinline__ void give(T* dst, const float (&v)[1]) {
  *dst = from_float<T>(v[0]);
}

}  // namespace norm
}  // namespace jaxprims
