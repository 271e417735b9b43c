// Norms whose statistics run down the columns of an [outer, rows, width] array, in 16-byte vectors across the columns (one by one
// where rows are not of whole vectors): batch norm NHWC (outer 1, width C), instance norm NHWC (outer N), group norm NHWC
// (outer N, a statistic is `share` neighbouring columns).
//   forward   y = act((x - mean) rstd scale + bias + residual)
//   backward  dx = rstd g - (rstd (sum g + xhat sum g xhat) - cmean - 2 (x - mean) cvar) / n, dscale, dbias, dresidual (backward.cu)
// Long: gather, merge and apply, forward and backward, share one plan of tiles and one set of loads; apart they would repeat them.
//
// Work     gather: a thread owns the columns of one vector and visits the tiles of its block, four rows in flight; all blocks
//          together sweep the rows from the last to the first; moments are taken about the mean of a thread's first rows and
//          become (count, pivot, mean, squared deviations); the lanes of a block unite theirs in shared memory. One value per
//          column and block goes to the workspace.
//          merge: a statistic unites blocks and columns, 32 or 128 threads each; parameter gradients add theirs from the same values.
//          apply: sweeps from the first row to the last: what was read last may still lie in L2.
// Order of every sum: fixed by the shape alone. Nothing is atomic.
// Cost     forward: x twice, y once; backward: x and dy twice, dx once. Bound: memory.
// Ladder   one H200, bfloat16, 256x56x56x256. Blocks with a contiguous chunk each, sums of the kernels' times under ncu:
//            forward   361 us: gather 104 (3.96 TB/s), merge 13, apply 244 (3.27 TB/s)
//            backward  552 us: gather 198 (4.15 TB/s), merge 8, apply 346 (3.5 TB/s)
//          Sweeps, wide merges, packed vectors, with ReLU: apply 222 (3.6 TB/s); backward 535: gather 201, merge 6, apply 329 (3.7).
//          A chain of calls in one program, launches included: forward 344 us, forward and backward 897 us (3.6 and 3.7 TB/s).
// Tried    two or eight rows in flight, two to four blocks an SM for gather and apply forward: equal to 8 % slower.
//          Group norm 32x64x64x320 held on chip by clusters of 8 and 16 blocks, read once, one launch: 111 and 134 us against
//          92 by sweeps (125 and 167 us forward and backward under ncu): probably waiting for the exchange of sums, once in
//          every round of blocks. Batch norm 256x7x7x2048 likewise: 88 us against 59.
#include <type_traits>

#include "norm/columns.cuh"

namespace jaxprims {
namespace norm {
namespace {

constexpr int kMerge = 4;  // values that a thread of a merge loads at a time

struct Spot {  // of a thread
  bool live;
  int lane;
  int64_t outer, chunk, column;
};
__device__ __forceinline__ Spot spot(const ColumnPlan& q, int vec) {
  Spot s;
  const int64_t b = blockIdx.x, strip = b % q.strips, rest = b / q.strips;
  s.chunk = rest % q.chunks, s.outer = rest / q.chunks;
  const int col = threadIdx.x % q.cols;
  s.lane = threadIdx.x / q.cols;
  s.column = (strip * q.cols + col) * vec;
  s.live = s.lane < q.lanes && s.column < q.width;
  return s;
}

// The rows of a thread, kRows at a time: row, row + lanes, ... of its block's tiles. Sweep down (from the last tile) or up.
template <int kRows>
struct Rows {
  int row, step, rows, lanes;  // the first row of the present tile; negative step: downwards
  __device__ __forceinline__ Rows(const ColumnPlan& q, const Spot& s, bool down) : rows(static_cast<int>(q.rows)), lanes(q.lanes) {
    const int tile = kRows * q.lanes, tiles = (rows + tile - 1) / tile, chunk = static_cast<int>(s.chunk);
    row = (down ? tiles - 1 - chunk : chunk) * tile + s.lane;
    step = (down ? -1 : 1) * static_cast<int>(q.chunks) * tile;
    if (down && row >= rows) row += step;  // the last tile may end before this lane
  }
  __device__ __forceinline__ bool more() const { return row >= 0 && row < rows; }
  __device__ __forceinline__ void next() { row += step; }
  __device__ __forceinline__ bool has(int u) const { return row + u * lanes < rows; }
};

// --- gather -----------------------------------------------------------------------------------------------------------------

template <class T, int V, int kRows, int kBlocks>
__global__ void __launch_bounds__(256, kBlocks)
columns_gather_moments(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, Value* partial) {
  __shared__ Value slot[V][256];
  const Spot s = spot(q, V);
  float pivot[V], a[V], b[V];
#pragma unroll
  for (int e = 0; e < V; ++e) pivot[e] = a[e] = b[e] = 0.f;
  int n = 0;
  if (s.live) {
    const T* const x = static_cast<const T*>(p.a[kX].data) + s.outer * q.rows * q.width + s.column;
    for (Rows<kRows> at(q, s, true); at.more(); at.next()) {
      Packed<V> h[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if (at.has(u)) h[u] = Packed<V>::take(x + (at.row + u * q.lanes) * q.width);
      if (n == 0 && !p.rms) {  // the mean of the first rows; exact for a constant
        const float share = 1.f / kRows;
        float first[V], v[V];
        widen<T>(h[0], first);
#pragma unroll
        for (int u = 1; u < kRows; ++u) {
          if (!at.has(u)) continue;
          widen<T>(h[u], v);
#pragma unroll
          for (int e = 0; e < V; ++e) pivot[e] += v[e] - first[e];
        }
#pragma unroll
        for (int e = 0; e < V; ++e) pivot[e] = first[e] + pivot[e] * share;
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!at.has(u)) continue;
        ++n;
        float v[V];
        widen<T>(h[u], v);
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

template <class T, int V, bool kAct, int kRows, int kBlocks>
__global__ void __launch_bounds__(256, kBlocks)
columns_gather_sums(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, float2* partial) {
  __shared__ float2 slot[V][256];
  const Spot s = spot(q, V);
  float a[V], b[V];
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = b[e] = 0.f;
  if (s.live) {
    const int64_t top = s.outer * q.rows * q.width + s.column;
    auto in = [&](Name n, int64_t down) { return static_cast<const T*>(p.a[n].data) + (top + down); };
    const Numbers<V> at = numbers<V>(q.share, q.width, s.outer, s.column);
    float mean[V], factor[V], bias[V];
    stat_values<T>(p.a[kMean], at, mean);
    if (kAct) line<T>(p, at, top, factor, bias);
    const bool more = kAct && p.a[kResidual].here();
    for (Rows<kRows> r(q, s, true); r.more(); r.next()) {
      Packed<V> hx[kRows], hd[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!r.has(u)) continue;
        const int64_t down = (r.row + u * q.lanes) * q.width;
        hx[u] = Packed<V>::take(in(kX, down));
        hd[u] = Packed<V>::take(in(kDy, down));
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!r.has(u)) continue;
        float c[V], h[V];
        widen<T>(hx[u], c);
        widen<T>(hd[u], h);
#pragma unroll
        for (int e = 0; e < V; ++e) c[e] -= mean[e];
        if (kAct) {
          float z[V], w[V];
#pragma unroll
          for (int e = 0; e < V; ++e) z[e] = fmaf(c[e], factor[e], bias[e]);
          if (more) {
            widen<T>(Packed<V>::take(in(kResidual, (r.row + u * q.lanes) * q.width)), w);
#pragma unroll
            for (int e = 0; e < V; ++e) z[e] += w[e];
          }
          times_slope(p.act, z, h);
        }
#pragma unroll
        for (int e = 0; e < V; ++e) {
          a[e] += h[e];
          b[e] = fmaf(h[e], c[e], b[e]);
        }
      }
    }
  }
  if (s.live) {
    float var[V], low[V];
    const Numbers<V> at = numbers<V>(q.share, q.width, s.outer, s.column);
    stat_values<T>(p.a[kVar], at, var);
    stat_values<T>(p.a[kLow], at, low);
#pragma unroll
    for (int e = 0; e < V; ++e) b[e] = (b[e] - low[e] * a[e]) * inverse_root(var[e], p.eps);
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

// --- merge: a block has 8 neighbouring results, `lanes` threads for each -----------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(1024)
columns_merge_moments(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const Value* partial) {
  __shared__ Value slot[1024];
  const int lane = threadIdx.x >> 3, lanes = blockDim.x >> 3;
  const int64_t across = q.width / q.share, s = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x & 7);
  const bool live = s < q.outer * across;
  Value v{0.f, 0.f, 0.f, 0.f};
  if (live) {
    const int64_t outer = s / across, group = s - outer * across;
    const Value* const from = partial + outer * q.chunks * q.width + group * q.share;
    const int count = static_cast<int>(q.chunks) * q.share;
    for (int e = lane; e < count; e += lanes * kMerge) {
      Value u[kMerge];
#pragma unroll
      for (int m = 0; m < kMerge; ++m) {
        const int at = e + lanes * m, c = at / q.share;
        u[m] = at < count ? from[c * q.width + (at - c * q.share)] : Value{0.f, 0.f, 0.f, 0.f};
      }
#pragma unroll
      for (int m = 0; m < kMerge; ++m) v = joined<Gather::kMoments>(v, u[m], p.rms);
    }
  }
  slot[threadIdx.x] = v;
  for (int half = lanes / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (lane < half) slot[threadIdx.x] = joined<Gather::kMoments>(slot[threadIdx.x], slot[threadIdx.x + half * 8], p.rms);
  }
  if (lane == 0 && live) finish<T, Gather::kMoments>(p, slot[threadIdx.x], p.view.first(s, p.wide), Gather::kMoments);
}

// Blocks [0, stats) have statistics' totals, the others the columns' parameter gradients.
template <class T>
__global__ void __launch_bounds__(1024)
columns_merge_sums(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const float2* partial, Value* totals,
                   int64_t stats, int each) {
  __shared__ float2 slot[1024];
  const int lane = threadIdx.x >> 3, lanes = blockDim.x >> 3;
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
    for (int e = lane; e < count; e += lanes) {
      const int c = e / q.share, k = e - c * q.share;
      const float2 u = from[static_cast<int64_t>(c) * q.width + k];
      const float w = get_or<T>(p.a[kScale], i + k, p.wide, 1.f);
      v.x += u.x * w, v.y += u.y * w;
    }
  } else if (live) {
    const float2* const from = partial + outer * q.chunks * q.width + at;
    const int64_t count = each == 2 ? q.chunks : q.outer * q.chunks;
#pragma unroll 4
    for (int64_t e = lane; e < count; e += lanes) {
      const float2 u = from[e * q.width];
      v.x += u.x, v.y += u.y;
    }
  }
  slot[threadIdx.x] = v;
  for (int half = lanes / 2; half > 0; half >>= 1) {
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

template <class T, int V, bool kMore, int kRows, int kBlocks>
__global__ void __launch_bounds__(256, kBlocks) columns_apply_forward(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q) {
  const Spot s = spot(q, V);
  if (!s.live) return;
  const int64_t top = s.outer * q.rows * q.width + s.column;
  const T* const x = static_cast<const T*>(p.a[kX].data) + top;
  const T* const residual = kMore ? static_cast<const T*>(p.a[kResidual].data) + top : nullptr;
  T* const y = static_cast<T*>(p.a[kY].data) + top;
  const Numbers<V> at = numbers<V>(q.share, q.width, s.outer, s.column);
  float mean[V], factor[V], bias[V];
  stat_values<T>(p.a[kMean], at, mean);
  line<T>(p, at, top, factor, bias);
  for (Rows<kRows> r(q, s, false); r.more(); r.next()) {
    Packed<V> hx[kRows], hr[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (!r.has(u)) continue;
      const int64_t down = (r.row + u * q.lanes) * q.width;
      hx[u] = Packed<V>::take_once(x + down);
      if (kMore) hr[u] = Packed<V>::take_once(residual + down);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (!r.has(u)) continue;
      float z[V], w[V];
      widen<T>(hx[u], z);
#pragma unroll
      for (int e = 0; e < V; ++e) z[e] = fmaf(z[e] - mean[e], factor[e], bias[e]);
      if (kMore) {
        widen<T>(hr[u], w);
#pragma unroll
        for (int e = 0; e < V; ++e) z[e] += w[e];
      }
      activate(p.act, z);
      give(y + (r.row + u * q.lanes) * q.width, z);
    }
  }
}

template <class T, int V, bool kAct, int kRows, int kBlocks>
__global__ void __launch_bounds__(256, kBlocks)
columns_apply_backward(const __grid_constant__ Problem p, const __grid_constant__ ColumnPlan q, const Value* totals) {
  const Spot s = spot(q, V);
  if (!s.live) return;
  const int64_t top = s.outer * q.rows * q.width + s.column;
  auto in = [&](Name n, int64_t down) { return static_cast<const T*>(p.a[n].data) + (top + down); };
  auto out = [&](Name n, int64_t down) { return static_cast<T*>(p.a[n].data) + (top + down); };
  const Numbers<V> at = numbers<V>(q.share, q.width, s.outer, s.column);
  float mean[V], factor[V], bias[V], k1[V], k2[V];
  stat_values<T>(p.a[kMean], at, mean);
  stat_values<T>(p.a[kLow], at, bias);
  stat_values<T>(p.a[kVar], at, factor);
  stat_values<T>(p.a[kCmean], at, k1);
  stat_values<T>(p.a[kCvar], at, k2);
#pragma unroll
  for (int e = 0; e < V; ++e) {  // dx = factor h - k1 - (x - mean) k2
    const float rstd = inverse_root(factor[e], p.eps);
    const Value t = totals[at.first + at.up[e]];
    const float inv_n = 1.f / t.n;
    k2[e] = (rstd * (rstd * t.b) - 2.f * k2[e]) * inv_n;
    k1[e] = (rstd * (p.rms ? 0.f : t.a) - k1[e]) * inv_n - bias[e] * k2[e];
  }
  line<T>(p, at, top, factor, bias);
  const bool more = kAct && p.a[kResidual].here(), both = p.a[kDresidual].here();
  for (Rows<kRows> r(q, s, false); r.more(); r.next()) {
    Packed<V> hx[kRows], hd[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (!r.has(u)) continue;
      const int64_t down = (r.row + u * q.lanes) * q.width;
      hx[u] = Packed<V>::take_once(in(kX, down));
      hd[u] = Packed<V>::take_once(in(kDy, down));
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (!r.has(u)) continue;
      const int64_t down = (r.row + u * q.lanes) * q.width;
      float c[V], h[V];
      widen<T>(hx[u], c);
      widen<T>(hd[u], h);
#pragma unroll
      for (int e = 0; e < V; ++e) c[e] -= mean[e];
      if (kAct) {
        float z[V], w[V];
#pragma unroll
        for (int e = 0; e < V; ++e) z[e] = fmaf(c[e], factor[e], bias[e]);
        if (more) {
          widen<T>(Packed<V>::take_once(in(kResidual, down)), w);
#pragma unroll
          for (int e = 0; e < V; ++e) z[e] += w[e];
        }
        times_slope(p.act, z, h);
      }
      if (both) give(out(kDresidual, down), h);
#pragma unroll
      for (int e = 0; e < V; ++e) h[e] = fmaf(factor[e], h[e], -fmaf(c[e], k2[e], k1[e]));
      give(out(kDx, down), h);
    }
  }
}

}  // namespace

// Threads of a merge of `count` parts each.
unsigned merge_threads(int64_t count) { return count > 256 ? 1024 : 256; }

// f(a value of the type, the columns of a thread).
template <class F>
cudaError_t with_vector(ffi::DataType dtype, const ColumnPlan& q, F&& f) {
  return with_type(dtype, [&](auto zero) {
    if (q.vec == 1) return f(zero, std::integral_constant<int, 1>{});
    return f(zero, std::integral_constant<int, kVec<decltype(zero)>>{});
  });
}

cudaError_t columns_moments(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, Value* partial, cudaStream_t stream) {
  return with_vector(dtype, q, [&](auto zero, auto vec) {
    using T = decltype(zero);
    constexpr int V = decltype(vec)::value;
    const unsigned blocks = static_cast<unsigned>(q.blocks());
    if constexpr (V == 1) {
      columns_gather_moments<T, 1, 8, 4><<<blocks, 256, 0, stream>>>(p, q, partial);
    } else {
      columns_gather_moments<T, V, 4, 3><<<blocks, 256, 0, stream>>>(p, q, partial);
    }
    const int64_t stats = q.outer * (q.width / q.share);
    columns_merge_moments<T><<<static_cast<unsigned>(ceil_div(stats, 8)), merge_threads(q.chunks * q.share), 0, stream>>>(p, q, partial);
    return cudaGetLastError();
  });
}

cudaError_t columns_forward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, cudaStream_t stream) {
  return with_vector(dtype, q, [&](auto zero, auto vec) {
    using T = decltype(zero);
    constexpr int V = decltype(vec)::value;
    const unsigned blocks = static_cast<unsigned>(q.blocks());
    if constexpr (V == 1) {
      if (p.a[kResidual].here()) columns_apply_forward<T, 1, true, 8, 4><<<blocks, 256, 0, stream>>>(p, q);
      else columns_apply_forward<T, 1, false, 8, 4><<<blocks, 256, 0, stream>>>(p, q);
    } else if (p.a[kResidual].here()) {
      columns_apply_forward<T, V, true, 4, 2><<<blocks, 256, 0, stream>>>(p, q);
    } else {
      columns_apply_forward<T, V, false, 4, 3><<<blocks, 256, 0, stream>>>(p, q);
    }
    return cudaGetLastError();
  });
}

cudaError_t columns_sums(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, float2* partial, Value* totals, int each,
                         cudaStream_t stream) {
  return with_vector(dtype, q, [&](auto zero, auto vec) {
    using T = decltype(zero);
    constexpr int V = decltype(vec)::value;
    const unsigned blocks = static_cast<unsigned>(q.blocks());
    if constexpr (V == 1) {
      columns_gather_sums<T, 1, true, 8, 4><<<blocks, 256, 0, stream>>>(p, q, partial);
    } else if (p.act == Act::kNone) {
      columns_gather_sums<T, V, false, 4, 2><<<blocks, 256, 0, stream>>>(p, q, partial);
    } else {
      columns_gather_sums<T, V, true, 4, 2><<<blocks, 256, 0, stream>>>(p, q, partial);
    }
    const int64_t stats = totals != nullptr ? ceil_div(q.outer * (q.width / q.share), 8) : 0;
    const int64_t columns = each == 0 ? 0 : ceil_div(each == 2 ? q.outer * q.width : q.width, 8);
    columns_merge_sums<T><<<static_cast<unsigned>(stats + columns), merge_threads(q.chunks * q.share), 0, stream>>>(p, q, partial, totals,
                                                                                                                 stats, each);
    return cudaGetLastError();
  });
}

cudaError_t columns_backward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, const Value* totals, cudaStream_t stream) {
  return with_vector(dtype, q, [&](auto zero, auto vec) {
    using T = decltype(zero);
    constexpr int V = decltype(vec)::value;
    const unsigned blocks = static_cast<unsigned>(q.blocks());
    if constexpr (V == 1) {
      columns_apply_backward<T, 1, true, 8, 4><<<blocks, 256, 0, stream>>>(p, q, totals);
    } else if (p.act == Act::kNone) {
      columns_apply_backward<T, V, false, 4, 2><<<blocks, 256, 0, stream>>>(p, q, totals);
    } else {
      columns_apply_backward<T, V, true, 4, 2><<<blocks, 256, 0, stream>>>(p, q, totals);
    }
    return cudaGetLastError();
  });
}

}  // namespace norm
}  // namespace jaxprims
