// Norms whose statistics run down the columns of an [outer, rows, width] array, in 16-byte vectors across the columns: batch norm
// NHWC (outer 1, width C), instance norm NHWC (outer N), group norm NHWC (outer N, a statistic is `share` neighbouring columns).
//   forward   y = act((x - mean) rstd scale + bias + residual)
//   backward  dx = rstd g - (rstd (sum g + xhat sum g xhat) - cmean - 2 (x - mean) cvar) / n, dscale, dbias, dresidual (backward.cu)
// Long: gather, merge and apply, forward and backward, share one plan of chunks and one set of loads; apart they would repeat them.
//
// Work     gather: a thread owns the columns of one vector and walks down a chunk of rows, four loads in flight; moments are
//          taken about the mean of its first rows and become (count, pivot, mean, squared deviations); the lanes of a block
//          unite theirs in shared memory. One value per column and chunk goes to the workspace.
//          merge: statistics unite chunks and columns, 32 threads each; parameter gradients add theirs from the same values.
//          apply: as gather, from the last row up: the end of a chunk was read last and may still lie in L2.
// Order of every sum: fixed by the shape alone. Nothing is atomic.
// Cost     forward: x twice, y once; backward: x and dy twice, dx once. Bound: memory.
// Ladder   (before set-up by vectors and numbers of statistics, which is not measured) one H200, bfloat16, 256x56x56x256, sums of the
//          kernels' times under ncu; the general kernels before: a benchmark's
//          4145 us forward and 10067 us backward.
//            forward   361 us: gather 104 (3.96 TB/s), merge 13, apply 244 (3.27 TB/s)
//            backward  552 us: gather 198 (4.15 TB/s), merge 8, apply 346 (3.5 TB/s)
//          group norm 32x64x64x320, 32 groups: forward 149 us (681 before), backward 202 us (2097 before); apply's set-up rules.
#include "norm/fast.cuh"

namespace jaxprims {
namespace norm {
namespace {

constexpr int kMerge = 4;  // values that a thread of a merge loads at a time
constexpr int kUnroll = 4, kFew = 3;  // loads in flight of each array; four would spill where a thread holds most

struct Spot {  // of a thread in its block's chunk
  bool live;
  int lane;
  int64_t outer, chunk, column, begin, end;
};
__device__ __forceinline__ Spot spot(const ColumnPlan& q, int vec) {
  Spot s;
  const int64_t b = blockIdx.x, strip = b % q.strips, rest = b / q.strips;
  s.chunk = rest % q.chunks, s.outer = rest / q.chunks;
  const int col = threadIdx.x % q.cols;
  s.lane = threadIdx.x / q.cols;
  s.column = (strip * q.cols + col) * vec;
  s.live = s.lane < q.lanes && s.column < q.width;
  s.begin = s.chunk * q.length;
  s.end = s.begin + q.length < q.rows ? s.begin + q.length : q.rows;
  return s;
}

// Values first, first + 1, ... of an array: one access where they are aligned.
template <class T>
__device__ __forceinline__ void neighbours(const Array& a, int64_t first, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  if (sizeof(T) == 4 || a.type == Type::kSame) {
    unpack<T>(take_vector(static_cast<const T*>(a.data) + first), v);
  } else {
    const float4* const f = reinterpret_cast<const float4*>(static_cast<const float*>(a.data) + first);
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      const float4 w = f[i];
      v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
    }
  }
}
template <class T>
__device__ __forceinline__ float value_at(const Array& a, int64_t j) {
  return a.type == Type::kSame ? to_float(static_cast<const T*>(a.data)[j]) : static_cast<const float*>(a.data)[j];
}

// An array's values at a vector of columns; i is the element of the first.
template <class T>
__device__ __forceinline__ void column_values(const Array& a, int64_t i, bool wide, float otherwise, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  if (!a.here()) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = otherwise;
    return;
  }
  const int64_t first = a.runs.at(i, wide);
  if (a.runs.mode != Runs::kZero && a.runs.inner_post.d == 1 && (a.runs.inner.d & (V - 1)) == 0) {
    neighbours<T>(a, first, v);
    return;
  }
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = value_at<T>(a, e == 0 ? first : a.runs.at(i + e, wide));
}

// The numbers of the statistics of a thread's columns: statistics' arrays lie in this order (columns_fit).
template <int V>
struct Numbers {
  int64_t first;
  int up[V];  // the number less `first`
  bool next;  // one for each column
};
template <int V>
__device__ __forceinline__ Numbers<V> numbers(const ColumnPlan& q, const Spot& s) {
  Numbers<V> n;
  n.next = q.share == 1;
  const int column = static_cast<int>(s.column), group = column / q.share;
  int rest = column - group * q.share, up = 0;
  n.first = s.outer * (q.width / q.share) + group;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    n.up[e] = up;
    if (++rest == q.share) rest = 0, ++up;
  }
  return n;
}
template <class T>
__device__ __forceinline__ void stat_values(const Array& a, const Numbers<kVec<T>>& n, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  if (!a.here()) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = 0.f;
  } else if (n.next) {
    neighbours<T>(a, n.first, v);
  } else {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = value_at<T>(a, n.first + n.up[e]);
  }
}

// rstd * scale. Forward and backward form z = fmaf(x - mean, factor, bias) alike, so that both see the same side of a kink.
template <class T>
__device__ __forceinline__ void factors(const Problem& p, const Numbers<kVec<T>>& at, int64_t i, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  float scale[V];
  stat_values<T>(p.a[kVar], at, v);
  column_values<T>(p.a[kScale], i, p.wide, 1.f, scale);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = inverse_root(v[e], p.eps) * scale[e];
}

// --- gather -----------------------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(256, 3)
columns_gather_moments(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, Value* partial) {
  constexpr int V = kVec<T>;
  __shared__ Value slot[V][256];
  const Spot s = spot(q, V);
  float pivot[V], a[V], b[V];
#pragma unroll
  for (int e = 0; e < V; ++e) pivot[e] = a[e] = b[e] = 0.f;
  int64_t n = 0;
  if (s.live && s.begin + s.lane < s.end) {
    n = (s.end - s.begin - s.lane + q.lanes - 1) / q.lanes;
    const int64_t step = q.lanes * q.width;
    const T* x = static_cast<const T*>(p.a[kX].data) + (s.outer * q.rows + s.begin + s.lane) * q.width + s.column;
    for (int64_t r = 0; r < n; r += kUnroll, x += kUnroll * step) {
      Held<T> h[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) h[u] = take_vector(r + u < n ? x + u * step : x);
      if (r == 0 && !p.rms) {  // exact for a constant
        const float share = 1.f / kUnroll;
        float first[V], v[V];
        unpack<T>(h[0], first);
#pragma unroll
        for (int u = 1; u < kUnroll; ++u) {
          unpack<T>(h[u], v);
#pragma unroll
          for (int e = 0; e < V; ++e) pivot[e] += v[e] - first[e];
        }
#pragma unroll
        for (int e = 0; e < V; ++e) pivot[e] = first[e] + pivot[e] * share;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (r + u >= n) continue;
        float v[V];
        unpack<T>(h[u], v);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const float d = v[e] - pivot[e];
          a[e] += d;
          b[e] += d * d;
        }
      }
    }
  }
  const float count = static_cast<float>(n);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    Value w{count, pivot[e], 0.f, b[e]};
    if (n > 0 && !p.rms) {
      w.a = a[e] / count;
      const float m = b[e] - a[e] * w.a;
      w.b = m < 0.f ? 0.f : m;  // NaN stays
    }
    slot[e][threadIdx.x] = w;
  }
  for (int rest = q.lanes; rest > 1;) {
    const int half = (rest + 1) / 2;
    __syncthreads();
    if (s.lane + half < rest) {
#pragma unroll
      for (int e = 0; e < V; ++e)
        slot[e][threadIdx.x] = joined<Gather::kMoments>(slot[e][threadIdx.x], slot[e][threadIdx.x + half * q.cols], p.rms);
    }
    rest = half;
  }
  if (s.lane != 0 || !s.live) return;  // lane 0 wrote what it reads
  Value* const out = partial + (s.outer * q.chunks + s.chunk) * q.width + s.column;
#pragma unroll
  for (int e = 0; e < V; ++e) out[e] = slot[e][threadIdx.x];
}

template <class T>
__global__ void __launch_bounds__(256, 2)
columns_gather_sums(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, float2* partial) {
  constexpr int V = kVec<T>;
  __shared__ float2 slot[V][256];
  const Spot s = spot(q, V);
  float a[V], b[V];
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = b[e] = 0.f;
  if (s.live && s.begin + s.lane < s.end) {
    const int64_t n = (s.end - s.begin - s.lane + q.lanes - 1) / q.lanes, step = q.lanes * q.width;
    const int64_t top = s.outer * q.rows * q.width + s.column, from = top + (s.begin + s.lane) * q.width;
    auto in = [&](Name n, int64_t down) { return static_cast<const T*>(p.a[n].data) + (from + down); };
    const Numbers<V> at = numbers<V>(q, s);
  float mean[V], low[V], factor[V], bias[V];
    stat_values<T>(p.a[kMean], at, mean);
    stat_values<T>(p.a[kLow], at, low);
#pragma unroll
    for (int e = 0; e < V; ++e) factor[e] = bias[e] = 0.f;
    if (p.act != Act::kNone) {
      factors<T>(p, at, top, factor);
      column_values<T>(p.a[kBias], top, p.wide, 0.f, bias);
    }
    for (int64_t r = 0; r < n; r += kFew) {
      Held<T> hx[kFew], hd[kFew];
#pragma unroll
      for (int u = 0; u < kFew; ++u) {
        const int64_t down = (r + u < n ? r + u : r) * step;
        hx[u] = take_vector(in(kX, down));
        hd[u] = take_vector(in(kDy, down));
      }
#pragma unroll
      for (int u = 0; u < kFew; ++u) {
        if (r + u >= n) continue;
        float c[V], h[V];
        unpack<T>(hx[u], c);
        unpack<T>(hd[u], h);
#pragma unroll
        for (int e = 0; e < V; ++e) c[e] = (c[e] - mean[e]) - low[e];
        if (p.act != Act::kNone) {
          float z[V], w[V];
#pragma unroll
          for (int e = 0; e < V; ++e) z[e] = fmaf(c[e], factor[e], bias[e]);
          if (p.a[kResidual].here()) {
            unpack<T>(take_vector(in(kResidual, (r + u) * step)), w);
#pragma unroll
            for (int e = 0; e < V; ++e) z[e] += w[e];
          }
          times_slope(p.act, z, h);
        }
#pragma unroll
        for (int e = 0; e < V; ++e) {
          a[e] += h[e];
          b[e] += h[e] * c[e];
        }
      }
    }
  }
  if (s.live) {
    float var[V];
    stat_values<T>(p.a[kVar], numbers<V>(q, s), var);
#pragma unroll
    for (int e = 0; e < V; ++e) b[e] *= inverse_root(var[e], p.eps);
  }
#pragma unroll
  for (int e = 0; e < V; ++e) slot[e][threadIdx.x] = {a[e], b[e]};
  for (int rest = q.lanes; rest > 1;) {
    const int half = (rest + 1) / 2;
    __syncthreads();
    if (s.lane + half < rest) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float2 u = slot[e][threadIdx.x + half * q.cols];
        slot[e][threadIdx.x].x += u.x;
        slot[e][threadIdx.x].y += u.y;
      }
    }
    rest = half;
  }
  if (s.lane != 0 || !s.live) return;
  float2* const out = partial + (s.outer * q.chunks + s.chunk) * q.width + s.column;
#pragma unroll
  for (int e = 0; e < V; ++e) out[e] = slot[e][threadIdx.x];
}

// --- merge: a block has 8 neighbouring results, 32 threads for each -------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(256)
columns_merge_moments(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const Value* partial) {
  __shared__ Value slot[256];
  const int lane = threadIdx.x >> 3;
  const int64_t across = q.width / q.share, s = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x & 7);
  const bool live = s < q.outer * across;
  Value v{0.f, 0.f, 0.f, 0.f};
  if (live) {
    const int64_t outer = s / across, group = s - outer * across;
    const Value* const from = partial + outer * q.chunks * q.width + group * q.share;
    const int count = static_cast<int>(q.chunks) * q.share;
    for (int e = lane; e < count; e += 32 * kMerge) {
      Value u[kMerge];
#pragma unroll
      for (int m = 0; m < kMerge; ++m) {
        const int at = e + 32 * m, c = at / q.share;
        u[m] = at < count ? from[c * q.width + (at - c * q.share)] : Value{0.f, 0.f, 0.f, 0.f};
      }
#pragma unroll
      for (int m = 0; m < kMerge; ++m) v = joined<Gather::kMoments>(v, u[m], p.rms);
    }
  }
  slot[threadIdx.x] = v;
#pragma unroll
  for (int half = 16; half > 0; half >>= 1) {
    __syncthreads();
    if (lane < half) slot[threadIdx.x] = joined<Gather::kMoments>(slot[threadIdx.x], slot[threadIdx.x + half * 8], p.rms);
  }
  if (lane == 0 && live) finish<T, Gather::kMoments>(p, slot[threadIdx.x], p.view.first(s, p.wide), Gather::kMoments);
}

// Blocks [0, stats) have statistics' totals, the others the columns' parameter gradients.
template <class T>
__global__ void __launch_bounds__(256)
columns_merge_sums(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const float2* partial, Value* totals,
                   int64_t stats, int each) {
  __shared__ float2 slot[256];
  const int lane = threadIdx.x >> 3;
  const bool total = blockIdx.x < stats;
  const int64_t s = (blockIdx.x - (total ? 0 : stats)) * 8 + (threadIdx.x & 7);
  const int64_t across = total ? q.width / q.share : q.width;
  const bool live = s < (total || each == 2 ? q.outer * across : across);
  const int64_t outer = s / across, at = s - outer * across;
  float2 v{0.f, 0.f};
  if (live && total) {
    const float2* const from = partial + outer * q.chunks * q.width + at * q.share;
    const int64_t i = outer * q.rows * q.width + at * q.share;
    const int count = static_cast<int>(q.chunks) * q.share;
#pragma unroll 4
    for (int e = lane; e < count; e += 32) {
      const int c = e / q.share, k = e - c * q.share;
      const float2 u = from[static_cast<int64_t>(c) * q.width + k];
      const float w = get_or<T>(p.a[kScale], i + k, p.wide, 1.f);
      v.x += u.x * w, v.y += u.y * w;
    }
  } else if (live) {
    const float2* const from = partial + outer * q.chunks * q.width + at;
    const int64_t count = each == 2 ? q.chunks : q.outer * q.chunks;
#pragma unroll 4
    for (int64_t e = lane; e < count; e += 32) {
      const float2 u = from[e * q.width];
      v.x += u.x, v.y += u.y;
    }
  }
  slot[threadIdx.x] = v;
#pragma unroll
  for (int half = 16; half > 0; half >>= 1) {
    __syncthreads();
    if (lane < half) {
      slot[threadIdx.x].x += slot[threadIdx.x + half * 8].x;
      slot[threadIdx.x].y += slot[threadIdx.x + half * 8].y;
    }
  }
  if (lane != 0 || !live) return;
  v = slot[threadIdx.x];
  if (total) {
    totals[s] = {static_cast<float>(q.rows * q.share), 0.f, v.x, v.y};
  } else {
    const int64_t i = outer * q.rows * q.width + at;
    put<T>(p.a[kDbias], i, p.wide, v.x);
    put<T>(p.a[kDscale], i, p.wide, v.y);
  }
}

// --- apply ------------------------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(256, 3) columns_apply_forward(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q) {
  constexpr int V = kVec<T>;
  const Spot s = spot(q, V);
  if (!s.live || s.begin + s.lane >= s.end) return;
  const int64_t n = (s.end - s.begin - s.lane + q.lanes - 1) / q.lanes, step = q.lanes * q.width;
  const int64_t top = s.outer * q.rows * q.width + s.column, from = top + (s.end - 1 - s.lane) * q.width;
  const T* x = static_cast<const T*>(p.a[kX].data) + from;
  const T* more = p.a[kResidual].here() ? static_cast<const T*>(p.a[kResidual].data) + from : nullptr;
  T* y = static_cast<T*>(p.a[kY].data) + from;
  const Numbers<V> at = numbers<V>(q, s);
  float mean[V], low[V], factor[V], bias[V];
  stat_values<T>(p.a[kMean], at, mean);
  stat_values<T>(p.a[kLow], at, low);
  factors<T>(p, at, top, factor);
  column_values<T>(p.a[kBias], top, p.wide, 0.f, bias);
  for (int64_t r = 0; r < n; r += kFew) {
    Held<T> hx[kFew];
#pragma unroll
    for (int u = 0; u < kFew; ++u) hx[u] = take_once(x - (r + u < n ? r + u : r) * step);
#pragma unroll
    for (int u = 0; u < kFew; ++u) {
      if (r + u >= n) continue;
      float z[V], w[V];
      unpack<T>(hx[u], z);
#pragma unroll
      for (int e = 0; e < V; ++e) z[e] = fmaf((z[e] - mean[e]) - low[e], factor[e], bias[e]);
      if (more != nullptr) {
        unpack<T>(take_once(more - (r + u) * step), w);
#pragma unroll
        for (int e = 0; e < V; ++e) z[e] += w[e];
      }
      activate(p.act, z);
      give(y - (r + u) * step, z);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256, 2)
columns_apply_backward(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const Value* totals) {
  constexpr int V = kVec<T>;
  const Spot s = spot(q, V);
  if (!s.live || s.begin + s.lane >= s.end) return;
  const int64_t n = (s.end - s.begin - s.lane + q.lanes - 1) / q.lanes, step = q.lanes * q.width;
  const int64_t top = s.outer * q.rows * q.width + s.column, from = top + (s.end - 1 - s.lane) * q.width;
  auto in = [&](Name n, int64_t back) { return static_cast<const T*>(p.a[n].data) + (from - back); };
  auto out = [&](Name n, int64_t back) { return static_cast<T*>(p.a[n].data) + (from - back); };
  const Numbers<V> at = numbers<V>(q, s);
  float mean[V], low[V], factor[V], bias[V], k1[V], k2[V];
  stat_values<T>(p.a[kMean], at, mean);
  stat_values<T>(p.a[kLow], at, low);
  stat_values<T>(p.a[kVar], at, factor);
  stat_values<T>(p.a[kCmean], at, k1);
  stat_values<T>(p.a[kCvar], at, k2);
#pragma unroll
  for (int e = 0; e < V; ++e) {  // dx = factor h - k1 - (x - mean) k2
    const float rstd = inverse_root(factor[e], p.eps);
    const Value t = totals[at.first + at.up[e]];
    const float inv_n = 1.f / t.n;
    k1[e] = (rstd * (p.rms ? 0.f : t.a) - k1[e]) * inv_n;
    k2[e] = (rstd * (rstd * t.b) - 2.f * k2[e]) * inv_n;
    bias[e] = 0.f;
  }
  factors<T>(p, at, top, factor);
  if (p.act != Act::kNone) column_values<T>(p.a[kBias], top, p.wide, 0.f, bias);
  for (int64_t r = 0; r < n; r += kFew) {
    Held<T> hx[kFew], hd[kFew];
#pragma unroll
    for (int u = 0; u < kFew; ++u) {
      const int64_t back = (r + u < n ? r + u : r) * step;
      hx[u] = take_once(in(kX, back));
      hd[u] = take_once(in(kDy, back));
    }
#pragma unroll
    for (int u = 0; u < kFew; ++u) {
      if (r + u >= n) continue;
      const int64_t back = (r + u) * step;
      float c[V], h[V];
      unpack<T>(hx[u], c);
      unpack<T>(hd[u], h);
#pragma unroll
      for (int e = 0; e < V; ++e) c[e] = (c[e] - mean[e]) - low[e];
      if (p.act != Act::kNone) {
        float z[V], w[V];
#pragma unroll
        for (int e = 0; e < V; ++e) z[e] = fmaf(c[e], factor[e], bias[e]);
        if (p.a[kResidual].here()) {
          unpack<T>(take_once(in(kResidual, back)), w);
#pragma unroll
          for (int e = 0; e < V; ++e) z[e] += w[e];
        }
        times_slope(p.act, z, h);
      }
      if (p.a[kDresidual].here()) give(out(kDresidual, back), h);
#pragma unroll
      for (int e = 0; e < V; ++e) h[e] = factor[e] * h[e] - k1[e] - c[e] * k2[e];
      give(out(kDx, back), h);
    }
  }
}

}  // namespace

cudaError_t columns_moments(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, Value* partial, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    columns_gather_moments<T><<<static_cast<unsigned>(q.blocks()), 256, 0, stream>>>(p, q, partial);
    const int64_t stats = q.outer * (q.width / q.share);
    columns_merge_moments<T><<<static_cast<unsigned>(ceil_div(stats, 8)), 256, 0, stream>>>(p, q, partial);
    return cudaGetLastError();
  });
}

cudaError_t columns_forward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    columns_apply_forward<T><<<static_cast<unsigned>(q.blocks()), 256, 0, stream>>>(p, q);
    return cudaGetLastError();
  });
}

cudaError_t columns_sums(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, float2* partial, Value* totals, int each,
                         cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    columns_gather_sums<T><<<static_cast<unsigned>(q.blocks()), 256, 0, stream>>>(p, q, partial);
    const int64_t stats = totals != nullptr ? ceil_div(q.outer * (q.width / q.share), 8) : 0;
    const int64_t columns = each == 0 ? 0 : ceil_div(each == 2 ? q.outer * q.width : q.width, 8);
    columns_merge_sums<T><<<static_cast<unsigned>(stats + columns), 256, 0, stream>>>(p, q, partial, totals, stats, each);
    return cudaGetLastError();
  });
}

cudaError_t columns_backward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, const Value* totals, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    columns_apply_backward<T><<<static_cast<unsigned>(q.blocks()), 256, 0, stream>>>(p, q, totals);
    return cudaGetLastError();
  });
}

}  // namespace norm
}  // namespace jaxprims
