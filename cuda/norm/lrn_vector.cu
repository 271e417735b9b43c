// Local response normalisation, channels innermost, windows of five channels, forward and backward: in registers.
//   y_c = x_c d_c^-beta,  d_c = k + alpha (x_{c-2}^2 + ... + x_{c+2}^2)
//   dx_j = dy_j d_j^-beta - 2 alpha beta x_j sum_{c = j-2 .. j+2} t_c,  t_c = dy_c x_c d_c^(-beta-1)
//
// Layout   [positions, channels], channels a multiple of a 16-byte vector.
// Work     a thread has one vector of channels and loads four channels of the vectors on either side too (from L1: its neighbours
//          load them as well), so that nothing is exchanged. Backward forms t of two more channels on either side again.
// Order    of a window's sum: by channel. Cost: each array once, the result once. Bound: memory; beta = 3/4 (all of AlexNet's) by square
//          roots, two of the few special-function operations an element can afford.
#include "norm/lrn.h"
#include "norm/vectors.cuh"

namespace jaxprims {
namespace norm {
namespace {

constexpr int kBlock = 256, kReach = 2, kSide = 4;  // kSide: channels loaded of a neighbour

// d^-beta; `inverse`: about 1 / d, to the accuracy of the rest.
template <class T, bool kQuarters>
__device__ __forceinline__ float power(float d, float beta, float& inverse) {
  if constexpr (kQuarters) {
    float r = rsqrtf(d);
    if (sizeof(T) == 4) {  // to the last bit but one
      const float e = fmaf(-d * r, r, 1.f), better = fmaf(.5f * r, e, r);
      r = e == e ? better : r;  // d of 0 or infinity
    }
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(r));
    inverse = r * r;
    return r * root;
  } else {
    inverse = 1.f / d;
    return sizeof(T) == 4 ? powf(d, -beta) : exp2f(-beta * __log2f(d));
  }
}

// Four channels.
__device__ __forceinline__ void four(const float* src, float* v) {
  const float4 u = *reinterpret_cast<const float4*>(src);
  v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
}
template <class T>
__device__ __forceinline__ void four(const T* src, float* v) {
  const uint2 u = *reinterpret_cast<const uint2*>(src);
  widen(u.x, v[0], v[1], T{}), widen(u.y, v[2], v[3], T{});
}
// A vector and four channels on either side of it, 0 where there are none.
template <class T>
__device__ __forceinline__ void around(const T* src, bool left, bool right, float (&v)[kVec<T> + 2 * kSide]) {
  constexpr int V = kVec<T>;
  float own[V];
  widen<T>(load16(src), own);
#pragma unroll
  for (int i = 0; i < kSide; ++i) v[i] = v[V + kSide + i] = 0.f;
  if (left) four(src - kSide, v);
  if (right) four(src + V, v + V + kSide);
#pragma unroll
  for (int i = 0; i < V; ++i) v[kSide + i] = own[i];
}

template <class T, bool kQuarters>
__global__ void __launch_bounds__(kBlock)
lrn_forward(const T* __restrict__ x, T* __restrict__ y, uint32_t vectors, FastDiv across, float alpha, float beta, float k) {
  constexpr int V = kVec<T>;
  const uint32_t i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= vectors) return;
  const uint32_t c = i - across.div(i) * across.d;
  float v[V + 2 * kSide], sq[V + 2 * kSide], out[V];
  around<T>(x + static_cast<int64_t>(i) * V, c != 0, c + 1 != across.d, v);
#pragma unroll
  for (int j = 0; j < V + 2 * kSide; ++j) sq[j] = v[j] * v[j];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float* const s = sq + j + kSide - kReach;
    float inverse;
    out[j] = v[j + kSide] * power<T, kQuarters>(fmaf(alpha, s[0] + s[1] + s[2] + s[3] + s[4], k), beta, inverse);
  }
  give(y + static_cast<int64_t>(i) * V, out);
}

template <class T, bool kQuarters>
__global__ void __launch_bounds__(kBlock)
lrn_backward(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx, uint32_t vectors, FastDiv across, float alpha,
             float beta, float k) {
  constexpr int V = kVec<T>;
  const uint32_t i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= vectors) return;
  const uint32_t c = i - across.div(i) * across.d;
  const bool left = c != 0, right = c + 1 != across.d;
  float v[V + 2 * kSide], g[V + 2 * kSide], sq[V + 2 * kSide], t[V + 2 * kReach], out[V];
  around<T>(x + static_cast<int64_t>(i) * V, left, right, v);
  around<T>(dy + static_cast<int64_t>(i) * V, left, right, g);
#pragma unroll
  for (int j = 0; j < V + 2 * kSide; ++j) sq[j] = v[j] * v[j];
#pragma unroll
  for (int j = 0; j < V + 2 * kReach; ++j) {
    const float* const s = sq + j;
    float inverse;
    const float f = power<T, kQuarters>(fmaf(alpha, s[0] + s[1] + s[2] + s[3] + s[4], k), beta, inverse);
    const float h = g[j + kReach] * f;
    t[j] = h * v[j + kReach] * inverse;
    if (j < kReach && !left) t[j] = 0.f;  // d of a channel that is not there may be 0
    if (j >= V + kReach && !right) t[j] = 0.f;
    if (j >= kReach && j < V + kReach) out[j - kReach] = h;
  }
  const float factor = -2.f * alpha * beta;
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = fmaf(factor * v[j + kSide], t[j] + t[j + 1] + t[j + 2] + t[j + 3] + t[j + 4], out[j]);
  give(dx + static_cast<int64_t>(i) * V, out);
}

}  // namespace

cudaError_t lrn_vector(ffi::DataType dtype, const void* x, const void* dy, void* out, const LrnShape& s, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = s.outer * s.channels / kVec<T>;
    const FastDiv across(static_cast<uint32_t>(s.channels / kVec<T>));
    const unsigned blocks = static_cast<unsigned>(ceil_div(n, kBlock));
    const auto count = static_cast<uint32_t>(n);
    const T* const from = static_cast<const T*>(x);
    const T* const back = static_cast<const T*>(dy);
    T* const to = static_cast<T*>(out);
    const bool quarters = s.beta == .75f;
    if (dy == nullptr) {
      if (quarters) lrn_forward<T, true><<<blocks, kBlock, 0, stream>>>(from, to, count, across, s.alpha, s.beta, s.k);
      else lrn_forward<T, false><<<blocks, kBlock, 0, stream>>>(from, to, count, across, s.alpha, s.beta, s.k);
    } else {
      if (quarters) lrn_backward<T, true><<<blocks, kBlock, 0, stream>>>(from, back, to, count, across, s.alpha, s.beta, s.k);
      else lrn_backward<T, false><<<blocks, kBlock, 0, stream>>>(from, back, to, count, across, s.alpha, s.beta, s.k);
    }
    return cudaGetLastError();
  });
}

}  // namespace norm
}  // namespace jaxprims
