// bias_act and its tangent:  z = x + bias[channel] + residual;  y = act(z),  or  out = act'(z) * t.
// Layout   anything row-major: an element e has channel (e / inner) % channels, so channels may be the last axis (inner = 1)
//          or any other. x, residual and t are walked alike.
// Work     one thread = one vector of up to 16 bytes; neighbouring threads neighbouring vectors; a grid-stride loop.
// Cost     reads x (residual, t) once, writes once; the bias stays in L1. Bound: memory.
// Sums     float32, one rounding at the end.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "act/bias_act.h"
#include "common/pack.cuh"

namespace jaxprims {
namespace {

constexpr int kBlock = 256;
constexpr int64_t kMaxGrid = int64_t{1} << 30;

__device__ __forceinline__ int64_t channel_of(int64_t e, const BiasActProblem& p) {
  if (e < INT32_MAX) {  // 32-bit divisions are several times faster
    const uint32_t s = static_cast<uint32_t>(e);
    const uint32_t q = p.inner == 1 ? s : p.inner > s ? 0 : s / static_cast<uint32_t>(p.inner);
    return p.channels > q ? q : q % static_cast<uint32_t>(p.channels);
  }
  return (e / p.inner) % p.channels;
}

template <class T, int V>
__global__ void __launch_bounds__(kBlock) bias_act(const T* __restrict__ x, const void* __restrict__ bias,
                                                   const T* __restrict__ residual, const T* __restrict__ t,
                                                   T* __restrict__ out, BiasActProblem p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock * V;
  for (int64_t e = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * V; e < p.total; e += step) {
    float z[V];
    load(z, x + p.lead.at(0, e));
    if (bias) {  // the launcher saw to it that a vector has one channel (inner > 1) or V consecutive ones
      const int64_t b = p.lead.axes ? e / p.lead.core : 0;
      const int64_t at = p.lead.offset(1, b) + channel_of(e - b * p.lead.core, p);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int64_t k = at + (p.inner == 1 ? i : 0);
        z[i] += p.bias_float32 ? static_cast<const float*>(bias)[k] : to_float(static_cast<const T*>(bias)[k]);
      }
    }
    if (residual) {
      float r[V];
      load(r, residual + p.lead.at(2, e));
#pragma unroll
      for (int i = 0; i < V; ++i) z[i] += r[i];
    }
    float y[V];
    if (t) {
      load(y, t + p.lead.at(3, e));
#pragma unroll
      for (int i = 0; i < V; ++i) y[i] *= act_slope(p.act, z[i]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) y[i] = act_apply(p.act, z[i]);
    }
    store(out + e, y);
  }
}

}  // namespace

template <class T>
cudaError_t launch_bias_act(const T* x, const void* bias, const T* residual, const T* t, T* out, const BiasActProblem& p,
                            cudaStream_t stream) {
  if (p.total == 0) return cudaSuccess;
  constexpr int kVector = 16 / sizeof(T);
  bool wide = widest_pack<T>(x, p.total) == kVector && widest_pack<T>(out, p.total) == kVector;
  if (residual) wide = wide && widest_pack<T>(residual, p.total) == kVector;
  if (t) wide = wide && widest_pack<T>(t, p.total) == kVector;
  if (p.lead.axes) wide = wide && p.lead.core % kVector == 0;
  if (bias) wide = wide && (p.inner == 1 ? p.channels : p.inner) % kVector == 0;
  const int64_t blocks = ceil_div(p.total, int64_t{kBlock} * (wide ? kVector : 1));
  const int grid = static_cast<int>(std::min(blocks, kMaxGrid));
  if (wide)
    bias_act<T, kVector><<<grid, kBlock, 0, stream>>>(x, bias, residual, t, out, p);
  else
    bias_act<T, 1><<<grid, kBlock, 0, stream>>>(x, bias, residual, t, out, p);
  return cudaGetLastError();
}

#define JAXPRIMS_BIAS_ACT(T) \
  template cudaError_t launch_bias_act<T>(const T*, const void*, const T*, const T*, T*, const BiasActProblem&, cudaStream_t);
JAXPRIMS_BIAS_ACT(float)
JAXPRIMS_BIAS_ACT(__half)
JAXPRIMS_BIAS_ACT(__nv_bfloat16)
#undef JAXPRIMS_BIAS_ACT

}  // namespace jaxprims
