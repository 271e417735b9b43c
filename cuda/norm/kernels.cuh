// The three kernels of every norm: gather, merge, apply.
//
//   gather  each statistic's Value over its elements, by groups of threads that follow `Plan`. With one chunk the same block
//           goes on: it writes the statistic's results and walks the elements a second time (now in L1 or L2) to write y, yd
//           or dx: one kernel, reads 1-2 x, writes 1 x. With several chunks it writes its part to the workspace.
//   merge   one warp per statistic adds the chunks' parts in a fixed order and writes the statistic's results.
//   apply   elementwise, statistics given.
//
// Moments are gathered as (count, pivot, mean of x - pivot, squared deviations), the pivot being the first element that the
// thread meets: float32 holds x - pivot nearly exactly, however large the mean. Two such Values merge by Chan's formula.
// Order of every sum: fixed by the shape alone, so the same bits in every run. Nothing is atomic.
// Bound: memory.
#pragma once
#include "common/pack.cuh"
#include "norm/problem.h"

namespace jaxprims {
namespace norm {

template <class T>
__device__ __forceinline__ float get(const Array& a, int64_t i, bool wide) {
  const int64_t j = a.runs.at(i, wide);
  return a.type == Type::kSame ? to_float(static_cast<const T*>(a.data)[j]) : static_cast<const float*>(a.data)[j];
}
template <class T>
__device__ __forceinline__ float get_or(const Array& a, int64_t i, bool wide, float otherwise) {
  return a.here() ? get<T>(a, i, wide) : otherwise;
}
__device__ __forceinline__ bool counted(const Array& mask, int64_t i, bool wide) {
  return !mask.here() || static_cast<const unsigned char*>(mask.data)[mask.runs.at(i, wide)] != 0;
}
template <class T>
__device__ __forceinline__ void put(const Array& a, int64_t i, bool wide, float v) {
  if (!a.here()) return;
  const int64_t j = a.runs.at(i, wide);
  if (a.type == Type::kSame) static_cast<T*>(a.data)[j] = from_float<T>(v);
  else static_cast<float*>(a.data)[j] = v;
}

// --- values -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Value plus(const Value& u, const Value& v) { return {u.n + v.n, 0.f, u.a + v.a, u.b + v.b}; }

__device__ __forceinline__ Value unite(const Value& u, const Value& v) {
  if (u.n == 0.f) return v;
  if (v.n == 0.f) return u;
  const float d = (v.p - u.p) + (v.a - u.a), n = u.n + v.n, w = v.n / n;
  return {n, u.p, u.a + d * w, u.b + v.b + d * d * (u.n * w)};
}

// ---- moments: one more element (Welford).
__device__ __forceinline__ void push(Value& v, float x, bool rms) {
  v.n += 1.f;
  if (rms) {
    v.b += x * x;
    return;
  }
  if (v.n == 1.f) v.p = x;
  const float t = x - v.p, d = t - v.a;
  v.a += __fdividef(d, v.n);
  v.b += d * (t - v.a);
}

__device__ __forceinline__ float inverse_root(float var, float eps) {
  const float v = var + eps;
  return v == 0.f ? 0.f : 1.f / sqrtf(v);  // 0: a constant input gives beta at eps = 0 too
}

// Mean (in two floats) and 1 / sqrt(var + eps) of a statistic, and what the second pass needs of the first.
struct Stat {
  float mean = 0.f, low = 0.f, rstd = 0.f, a = 0.f, b = 0.f, inv_n = 0.f;
};
template <class T>
__device__ __forceinline__ Stat stat_at(const Problem& p, int64_t i) {
  Stat s;
  s.mean = get_or<T>(p.a[kMean], i, p.wide, 0.f);
  s.low = get_or<T>(p.a[kLow], i, p.wide, 0.f);
  s.rstd = inverse_root(get<T>(p.a[kVar], i, p.wide), p.eps);
  return s;
}
__device__ __forceinline__ void add_sums(Stat& s, const Value& v) {
  s.a = v.a, s.b = v.b;
  s.inv_n = v.n > 0.f ? 1.f / v.n : 0.f;
}
// Mean, low word of the mean and variance of gathered moments.
__device__ __forceinline__ void moments_of(const Value& v, bool rms, float& mean, float& low, float& var) {
  var = v.n > 0.f ? v.b / v.n : 0.f;
  mean = low = 0.f;
  if (rms || v.n == 0.f) return;
  mean = v.p + v.a;
  const float back = mean - v.p;
  low = (v.p - (mean - back)) + (v.a - back);
  if (!(fabsf(low) < INFINITY)) low = 0.f;
}

// --- one element ------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float centred(const Problem& p, const Stat& s, int64_t i) {
  return (get<T>(p.a[kX], i, p.wide) - s.mean) - s.low;
}
template <class T>
__device__ __forceinline__ float pre_activation(const Problem& p, float xhat, float scale, int64_t i) {
  return xhat * scale + get_or<T>(p.a[kBias], i, p.wide, 0.f) + get_or<T>(p.a[kResidual], i, p.wide, 0.f);
}
// dy * act'(z)
template <class T>
__device__ __forceinline__ float cotangent(const Problem& p, float xhat, float scale, int64_t i) {
  const float dy = get<T>(p.a[kDy], i, p.wide);
  return p.act == Act::kNone ? dy : dy * act_slope(p.act, pre_activation<T>(p, xhat, scale, i));
}

template <class T>
__device__ __forceinline__ void apply_forward(const Problem& p, const Stat& s, int64_t i) {
  const float xhat = centred<T>(p, s, i) * s.rstd;
  const float z = pre_activation<T>(p, xhat, get_or<T>(p.a[kScale], i, p.wide, 1.f), i);
  put<T>(p.a[kY], i, p.wide, act_apply(p.act, z));
}

template <class T>
__device__ __forceinline__ void apply_tangent(const Problem& p, const Stat& s, int64_t i) {
  const float xhat = centred<T>(p, s, i) * s.rstd;
  const float scale = get_or<T>(p.a[kScale], i, p.wide, 1.f);
  float zd = get_or<T>(p.a[kXd], i, p.wide, 0.f) * s.rstd;
  if (p.fixed) {
    zd -= s.rstd * get_or<T>(p.a[kMeand], i, p.wide, 0.f);
    zd -= xhat * (0.5f * s.rstd * s.rstd * get_or<T>(p.a[kVard], i, p.wide, 0.f));
  } else {
    zd -= s.rstd * ((p.rms ? 0.f : s.a * s.inv_n) + xhat * (s.b * s.inv_n));
  }
  zd = zd * scale + xhat * get_or<T>(p.a[kScaled], i, p.wide, 0.f);
  zd += get_or<T>(p.a[kBiasd], i, p.wide, 0.f) + get_or<T>(p.a[kResiduald], i, p.wide, 0.f);
  if (p.act != Act::kNone) zd *= act_slope(p.act, pre_activation<T>(p, xhat, scale, i));
  put<T>(p.a[kYd], i, p.wide, zd);
}

template <class T>
__device__ __forceinline__ void apply_backward(const Problem& p, const Stat& s, int64_t i) {
  const float c = centred<T>(p, s, i), xhat = c * s.rstd;
  const float scale = get_or<T>(p.a[kScale], i, p.wide, 1.f);
  const float h = cotangent<T>(p, xhat, scale, i);
  put<T>(p.a[kDresidual], i, p.wide, h);
  float dx = s.rstd * h * scale;
  if (!p.fixed && counted(p.a[kMask], i, p.wide)) {
    float back = s.rstd * ((p.rms ? 0.f : s.a) + xhat * s.b);
    if (p.a[kCmean].here()) back -= get<T>(p.a[kCmean], i, p.wide) + 2.f * c * get<T>(p.a[kCvar], i, p.wide);
    dx -= back * s.inv_n;
  }
  put<T>(p.a[kDx], i, p.wide, dx);
}

// --- a statistic --------------------------------------------------------------------------------------------------------

template <class T, Gather kGather>
__device__ __forceinline__ void take(const Problem& p, const Stat& s, int64_t i, Gather gather, Value& v) {
  if constexpr (kGather == Gather::kMoments) {
    if (counted(p.a[kMask], i, p.wide)) push(v, get<T>(p.a[kX], i, p.wide), p.rms);
  } else if constexpr (kGather == Gather::kTangent) {
    if (!counted(p.a[kMask], i, p.wide)) return;
    const float xd = get<T>(p.a[kXd], i, p.wide);
    v = plus(v, {1.f, 0.f, xd, xd * centred<T>(p, s, i) * s.rstd});
  } else {  // kBackward, kParam, kFixed at run time
    const Stat t = gather == Gather::kBackward ? s : stat_at<T>(p, i);  // the others may sum over several statistics
    const float xhat = centred<T>(p, t, i) * t.rstd;
    const float scale = get_or<T>(p.a[kScale], i, p.wide, 1.f);
    float h = cotangent<T>(p, xhat, scale, i), w = 1.f;
    if (gather != Gather::kParam) h *= scale;
    if (gather == Gather::kFixed) h *= t.rstd, w = t.rstd;
    v = plus(v, {counted(p.a[kMask], i, p.wide) ? 1.f : 0.f, 0.f, h, h * xhat * w});
  }
}

template <Gather kGather>
__device__ __forceinline__ Value joined(const Value& u, const Value& v, bool rms) {
  if constexpr (kGather == Gather::kMoments) return rms ? plus(u, v) : unite(u, v);
  else return plus(u, v);
}

// The results that a statistic has; i is its first element.
template <class T, Gather kGather>
__device__ __forceinline__ void finish(const Problem& p, const Value& v, int64_t i, Gather gather) {
  if constexpr (kGather == Gather::kMoments) {
    float mean, low, var;
    moments_of(v, p.rms, mean, low, var);
    put<T>(p.a[kMean], i, p.wide, mean);
    put<T>(p.a[kLow], i, p.wide, low);
    put<T>(p.a[kVar], i, p.wide, var);
    put<T>(p.a[kCount], i, p.wide, v.n);
  } else if constexpr (kGather == Gather::kTangent) {
    if (!p.a[kTmean].here()) return;
    const Stat s = stat_at<T>(p, i);
    const float inv_n = v.n > 0.f ? 1.f / v.n : 0.f;
    put<T>(p.a[kTmean], i, p.wide, v.a * inv_n);
    put<T>(p.a[kTvar], i, p.wide, s.rstd > 0.f ? 2.f * v.b * inv_n / s.rstd : 0.f);
  } else if (gather == Gather::kParam) {
    put<T>(p.a[kDbias], i, p.wide, v.a);
    put<T>(p.a[kDscale], i, p.wide, v.b);
  } else if (gather == Gather::kFixed) {
    put<T>(p.a[kDmean], i, p.wide, -v.a);
    put<T>(p.a[kDvar], i, p.wide, -0.5f * v.b);
  }
}

template <class T, Gather kGather>
__device__ __forceinline__ void apply_element(const Problem& p, const Stat& s, int64_t i) {
  if constexpr (kGather == Gather::kMoments) apply_forward<T>(p, s, i);
  else if constexpr (kGather == Gather::kTangent) apply_tangent<T>(p, s, i);
  else apply_backward<T>(p, s, i);
}

// --- kernels ------------------------------------------------------------------------------------------------------------

template <class T, Gather kGather>
__global__ void __launch_bounds__(kThreads) norm_gather(const __grid_constant__ Problem p, Gather gather, bool then) {
  __shared__ Value shared[kThreads];
  const Plan& plan = p.plan;
  const int64_t tile = blockIdx.x % plan.tiles, chunk = blockIdx.x / plan.tiles;
  const int group = plan.group, tid = threadIdx.x;
  const int mine = plan.column ? tid & 31 : tid / group, lane = plan.column ? tid >> 5 : tid % group;
  int64_t s;
  bool live;
  if (plan.column) {
    const int64_t strips = (p.view.s1 + 31) / 32, outer = tile / strips, column = (tile - outer * strips) * 32 + mine;
    live = column < p.view.s1;
    s = outer * p.view.s1 + column;
  } else {
    s = tile * (kThreads / group) + mine;
    live = s < p.view.statistics();
  }
  const int64_t first = live ? p.view.first(s, p.wide) : 0;
  const int64_t begin = chunk * plan.length, whole = p.view.reduced();
  const int64_t end = begin + plan.length < whole ? begin + plan.length : whole;

  Stat stat;
  if (live && (gather == Gather::kTangent || gather == Gather::kBackward)) stat = stat_at<T>(p, first);
  Value v{0.f, 0.f, 0.f, 0.f};
  if (live) {
    for (int64_t r = begin + lane; r < end; r += group)
      take<T, kGather>(p, stat, first + p.view.offset(r, p.wide), gather, v);
  }

  // A tree over the group, in shared memory.
  Value* const slot = shared + mine * group;
  slot[lane] = v;
  for (int half = group / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (lane < half) slot[lane] = joined<kGather>(slot[lane], slot[lane + half], p.rms);
  }
  __syncthreads();
  if (!live) return;
  v = slot[0];

  if (plan.chunks > 1) {
    if (lane == 0) p.partial[chunk * p.view.statistics() + s] = v;
    return;
  }
  if (lane == 0) finish<T, kGather>(p, v, first, gather);
  if (!then) return;
  if constexpr (kGather == Gather::kMoments) {
    float var;
    moments_of(v, p.rms, stat.mean, stat.low, var);
    stat.rstd = inverse_root(var, p.eps);
  } else {
    add_sums(stat, v);
  }
  for (int64_t r = lane; r < whole; r += group) apply_element<T, kGather>(p, stat, first + p.view.offset(r, p.wide));
}

template <class T, Gather kGather>
__global__ void __launch_bounds__(kThreads) norm_merge(const __grid_constant__ Problem p, Gather gather) {
  const int lane = threadIdx.x & 31;
  const int64_t s = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5), n = p.view.statistics();
  if (s >= n) return;
  Value v{0.f, 0.f, 0.f, 0.f};
  for (int64_t c = lane; c < p.plan.chunks; c += 32) v = joined<kGather>(v, p.partial[c * n + s], p.rms);
#pragma unroll
  for (int half = 16; half > 0; half >>= 1) {
    const Value u{__shfl_down_sync(0xffffffffu, v.n, half), __shfl_down_sync(0xffffffffu, v.p, half),
                  __shfl_down_sync(0xffffffffu, v.a, half), __shfl_down_sync(0xffffffffu, v.b, half)};
    v = joined<kGather>(v, u, p.rms);
  }
  if (lane != 0) return;
  p.totals[s] = v;
  finish<T, kGather>(p, v, p.view.first(s, p.wide), gather);
}

template <class T, Gather kGather>
__global__ void __launch_bounds__(kThreads) norm_apply(const __grid_constant__ Problem p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.total; i += step) {
    Stat s = stat_at<T>(p, i);
    if (p.totals != nullptr) add_sums(s, p.totals[p.by_stat.at(i, p.wide)]);
    apply_element<T, kGather>(p, s, i);
  }
}

// --- launchers ------------------------------------------------------------------------------------------------------------

template <class T, Gather kGather>
cudaError_t launch_apply(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.total, kThreads);
  norm_apply<T, kGather><<<static_cast<unsigned>(blocks < (1 << 20) ? blocks : (1 << 20)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class T, Gather kGather>
cudaError_t launch(const Problem& p, Gather gather, bool then, cudaStream_t stream) {
  const int64_t blocks = p.plan.tiles * p.plan.chunks;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  norm_gather<T, kGather><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, gather, then);
  if (p.plan.chunks == 1) return cudaGetLastError();
  norm_merge<T, kGather><<<static_cast<unsigned>(ceil_div(p.view.statistics(), kThreads / 32)), kThreads, 0, stream>>>(p, gather);
  if (!then) return cudaGetLastError();
  return launch_apply<T, kGather>(p, stream);
}

template <class F>
cudaError_t with_type(ffi::DataType dtype, F&& f) {
  switch (dtype) {
    case ffi::DataType::F32: return f(float{});
    case ffi::DataType::F16: return f(__half{});
    case ffi::DataType::BF16: return f(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace norm
}  // namespace jaxprims
