// Reductions inside a warp and a block, always in the same order, so that two runs give the same bits.
#pragma once

namespace jaxprims {

template <class F>
__device__ __forceinline__ float warp_reduce(float v, F op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// Every thread of the block gets the result. `scratch` holds 33 floats of shared memory; blockDim.x is a multiple of 32.
template <class F>
__device__ __forceinline__ float block_reduce(float v, float identity, F op, float* scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  v = warp_reduce(v, op);
  __syncthreads();  // the scratch may still be read by an earlier call
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = warp_reduce(lane < warps ? scratch[lane] : identity, op);
    if (lane == 0) scratch[32] = v;
  }
  __syncthreads();
  return scratch[32];
}

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
// NaN wins.
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return (a != a || a > b) ? a : b; }
};

__device__ __forceinline__ float block_sum(float v, float* scratch) { return block_reduce(v, 0.f, Add{}, scratch); }

// Count, mean and sum of squared deviations of a set of numbers, and how two such sets become one (Chan et al.).
struct Moments {
  float n, mean, m2;
};
__device__ __forceinline__ Moments merge(Moments a, Moments b) {
  const float n = a.n + b.n;
  if (n == 0.f) return {0.f, 0.f, 0.f};
  const float d = b.mean - a.mean, w = b.n / n;
  return {n, a.mean + d * w, a.m2 + b.m2 + d * d * a.n * w};
}
__device__ __forceinline__ Moments push(Moments a, float x) { return merge(a, {1.f, x, 0.f}); }

}  // namespace jaxprims
