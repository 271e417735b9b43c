// What softmax_row.cu and softmax_long.cu share: rows as aligned vectors, exponentials, the terms of the tangents.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "act/softmax.h"
#include "common/pack.cuh"

namespace jaxprims {

// Rows too long for registers, in softmax_long.cu.
template <class T>
cudaError_t launch_softmax_long(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream);
template <class T>
cudaError_t launch_softmax_pair_long(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream);

// Half types' rows of whole vectors, in softmax_whole.cu; false: not taken, else e tells what the launch gave.
template <class T>
bool launch_softmax_whole(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream, cudaError_t& e);
template <class T>
bool launch_pair_whole(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, cudaStream_t stream, cudaError_t& e);

namespace {

constexpr float kInf = INFINITY;
constexpr float kLog2e = 1.4426950408889634f;

template <class T>
constexpr int kV = 16 / sizeof(T);

__device__ __forceinline__ float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
template <class T>
__device__ __forceinline__ float exp_of(float x) {
  if constexpr (sizeof(T) == 4) return expf(x);
  else return exp2_of(x * kLog2e);
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
struct MaxNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return max_nan(a, b); }
};

// A row and the aligned vectors over it: vector k holds the row's elements k*V - shift .. + V - 1.
template <class T, class I>
struct Frame {
  I n;
  int shift;
  I vectors;
  __device__ __forceinline__ Frame(int64_t first, I length) : n(length) {
    shift = static_cast<int>(first % kV<T>);
    vectors = (n + shift + kV<T> - 1) / kV<T>;
  }
  __device__ __forceinline__ I start(I k) const { return k * kV<T> - shift; }
  __device__ __forceinline__ bool whole(I k) const { return start(k) >= 0 && start(k) + kV<T> <= n; }
};

// Elements of vector k of a row; what is not the row's is `fill`.
template <class T, class I>
__device__ __forceinline__ Pack<T, kV<T>> read(const T* row, const Frame<T, I>& f, I k, T fill) {
  Pack<T, kV<T>> p;
  const I i = f.start(k);
  if (f.whole(k)) return *reinterpret_cast<const Pack<T, kV<T>>*>(row + i);
#pragma unroll
  for (int v = 0; v < kV<T>; ++v) p.v[v] = i + v >= 0 && i + v < f.n ? row[i + v] : fill;
  return p;
}

template <class T, class I>
__device__ __forceinline__ void write(T* row, const Frame<T, I>& f, I k, const float (&value)[kV<T>]) {
  const I i = f.start(k);
  if (f.whole(k)) {
    store(row + i, value);
    return;
  }
#pragma unroll
  for (int v = 0; v < kV<T>; ++v)
    if (i + v >= 0 && i + v < f.n) row[i + v] = from_float<T>(value[v]);
}

// e / s for many e; float32: to the last bit but one, also of the smallest sums, as only the fast form has them.
template <class T>
struct Divider {
  float s, scale, inverse;
  __device__ __forceinline__ explicit Divider(float sum) : s(sum), scale(1.f) {
    if (sizeof(T) == 4 && sum < 0x1p-100f) scale = 0x1p100f, s *= scale;
    inverse = 1.f / s;
  }
  __device__ __forceinline__ float operator()(float e) const {
    if constexpr (sizeof(T) == 2) return e * inverse;
    const float n = e * scale, q = n * inverse;
    return inverse > 0.f ? fmaf(fmaf(-q, s, n), inverse, q) : q;
  }
};

template <class T, PairOp kOp>
__device__ __forceinline__ float pair_term(float y, float t) {
  return kOp == PairOp::kSoftmaxJvp ? y * t : kOp == PairOp::kLogSoftmaxJvp ? exp_of<T>(y) * t : t;
}
template <class T, PairOp kOp>
__device__ __forceinline__ float pair_finish(float y, float t, float sum) {
  return kOp == PairOp::kSoftmaxJvp ? y * (t - sum) : kOp == PairOp::kLogSoftmaxJvp ? t - sum : t - exp_of<T>(y) * sum;
}

inline unsigned grid_of(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, int64_t{1} << 27)); }

}  // namespace
}  // namespace jaxprims
