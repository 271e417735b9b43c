// Backward norms whose statistics are rows of consecutive elements, in 16-byte vectors.
//   dx = rstd (g - (sum g + xhat sum g xhat) / n) + ..., dresidual = h, dscale = sum h xhat, dbias = sum h
//   with h = dy act'(z), g = h scale, and behind ... what the cotangents of mean and var add.
//
// Layout   as rows_forward.cu.
// Work     a persistent grid; 8 or 32 lanes or a block work on a row while x and dy of its next rows are on their way to shared
//          memory and the next row's statistics to registers. A thread reads what it copied itself: one barrier a row, of the two
//          sums. g and xhat stay in registers between the sums and dx (not at 32 elements a thread: they are made again). Each
//          thread's columns stay the same, so that dscale and dbias gather in registers over all rows of a block; one partial sum
//          a block, added in a fixed order by rows_sums.
// Cost     x and dy once, dx once, and two floats per column and block. Bound: memory; of half types, instructions come close.
// Measured on an H200, share of a copy (4.10 TB/s), LN and RMS with rows_sums: bf16 32768x4096 76, 77 %; 131072x1024 85, 86 %;
//          1048576x128 89, 93 %; 26000x5120 75, 76 %; 16384x8192 73, 74 %; 8192x16384 67, 68 %; 4096x32768 56, 57 %;
//          float32 16384x4096 88 %, 65536x1024 93 %, 8192x8192 83, 84 %, 4096x16384 66 %.
// Tried    the loop alone, bf16 32768x4096: 256 threads with 16 elements each 90 % with 3 and with 4 stages, g and xhat made again
//          88 %; 128 with 32 87 %; 512 with 8 78 %, where they spill 40 %.
#include "common/async_copy.cuh"
#include "norm/rows.cuh"

namespace jaxprims {
namespace norm {
namespace {

// Copies of 16 bytes to shared memory that a thread waits for and reads itself: no barrier.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool real) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  jaxprims::copy_async(at, from, real ? 16 : 0);
}
template <class T>
__device__ __forceinline__ void staged(const uint4* from, float (&v)[kVec<T>]) {
  const uint4 u = *from;
  Held<T> h;
  memcpy(&h, &u, 16);
  unpack<T>(h, v);
}

// What a row's threads need of its statistics, as loaded.
struct RowStat {
  float mean, low, var, cmean, cvar;
};
template <class T, bool kPlain>
__device__ __forceinline__ RowStat row_stat(const Problem& p, const RowPlan& q, int64_t row) {
  if (row >= q.rows) return {};
  if constexpr (kPlain) {  // float32, one a row
    RowStat s{0.f, 0.f, static_cast<const float*>(p.a[kVar].data)[row], 0.f, 0.f};
    if (p.a[kMean].data != nullptr) s.mean = static_cast<const float*>(p.a[kMean].data)[row];
    if (p.a[kLow].data != nullptr) s.low = static_cast<const float*>(p.a[kLow].data)[row];
    return s;
  }
  return {get_row<T>(p, q, p.a[kMean], row), get_row<T>(p, q, p.a[kLow], row), get_row<T>(p, q, p.a[kVar], row),
          get_row<T>(p, q, p.a[kCmean], row), get_row<T>(p, q, p.a[kCvar], row)};
}

// The stages of x and dy in shared memory: [stage][x, dy][k][thread].
constexpr int kStages = 3;
constexpr int stage_bytes(int k, int block) { return kStages * 2 * k * block * 16; }
constexpr int most_threads(int group, int elements) { return group > 0 || elements <= 8 ? 256 : 512; }
constexpr int least_blocks(int group, int elements, bool plain) {
  return elements <= 8 ? (!plain ? 2 : group > 0 ? 3 : 4) : elements <= 16 && group > 0 ? 2 : 1;
}

// kGroup: lanes of a row, kBlock or kCluster. K vectors a thread. kPlain: RowPlan's, and statistics float32, no cotangents of them, no
// residual.
template <class T, int kGroup, int K, bool kPlain>
__global__ void __launch_bounds__(most_threads(kGroup, K * kVec<T>), least_blocks(kGroup, K * kVec<T>, kPlain))
rows_backward_held(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q, float* partial) {
  constexpr int V = kVec<T>;
  constexpr bool kKeep = K * V <= 16;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kGroup == kCluster) return;
#endif
  extern __shared__ uint4 stage[];
  __shared__ Scratch<Sum2, kGroup> scratch[2];
  const Team<kGroup> team(q.cluster);
  const int group = team.size, lane = team.lane;
  const int64_t step = team.step;
  const float inv_n = 1.f / static_cast<float>(q.length);
  int turn = 0;

  float dscale[K][V], dbias[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) dscale[k][e] = dbias[k][e] = 0.f;

  auto place = [&](int at, int which, int k) { return stage + ((at * 2 + which) * K + k) * blockDim.x + threadIdx.x; };
  auto fetch = [&](int64_t row, int at) {
    const int64_t i = row * q.length;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      const bool in = row < q.rows && j < q.length;
      copy_async(place(at, 0, k), static_cast<const T*>(p.a[kX].data) + (in ? i + j : 0), in);
      copy_async(place(at, 1, k), static_cast<const T*>(p.a[kDy].data) + (in ? i + j : 0), in);
    }
    copies_commit();
  };

  if constexpr (kGroup == kCluster) cluster_sync();  // all are there
  int64_t row = team.row;
#pragma unroll
  for (int a = 0; a < kStages - 1; ++a) fetch(row + a * step, a);
  RowStat next{};
  if constexpr (kKeep) next = row_stat<T, kPlain>(p, q, row);
  int at = 0;
  for (int64_t top = team.top; top < q.rows; top += step, row += step) {
    fetch(row + (kStages - 1) * step, at == 0 ? kStages - 1 : at - 1);
    const RowStat s = kKeep ? next : row_stat<T, kPlain>(p, q, row);
    if constexpr (kKeep) next = row_stat<T, kPlain>(p, q, row + step);
    const float rstd = quick_inverse_root(s.var, p.eps), less = -s.low * rstd;
    const bool live = row < q.rows;
    const int64_t i = row * q.length;
    Bases bs;
    if (!kPlain && live) bs = bases(p, q, row);
    float xhat[kKeep ? K : 1][V], g[kKeep ? K : 1][V];
    // xhat and h of vector k, as the copies brought them.
    auto read = [&](int k, int j, float(&xh)[V], float(&h)[V]) {
      staged<T>(place(at, 0, k), xh);
      staged<T>(place(at, 1, k), h);
#pragma unroll
      for (int e = 0; e < V; ++e) xh[e] = fmaf(xh[e] - s.mean, rstd, less);
      if constexpr (!kPlain) {
        if (p.act != Act::kNone) {
          float z[V];
#pragma unroll
          for (int e = 0; e < V; ++e) z[e] = xh[e];
          pre<T, false>(p, q, bs, i, j, z);
          times_slope(p.act, z, h);
        }
      }
    };
    copies_wait<kStages - 1>();
    Sum2 sum{0.f, 0.f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V, m = kKeep ? k : 0;
      if (!live || j >= q.length) continue;
      float w[V];
      row_values<T, kPlain>(p.a[kScale], q.scale, bs.scale, j, 1.f, w);
      read(k, j, xhat[m], g[m]);
      if (!kPlain && p.a[kDresidual].here()) give(static_cast<T*>(p.a[kDresidual].data) + i + j, g[m]);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        dbias[k][e] += g[m][e];
        dscale[k][e] = fmaf(g[m][e], xhat[m][e], dscale[k][e]);
        g[m][e] *= w[e];
        sum.a += g[m][e];
        sum.b = fmaf(g[m][e], xhat[m][e], sum.b);
      }
    }
    sum = row_sum<kGroup>(sum, scratch[turn], q.cluster);
    turn ^= 1;
    if (live) {
      // dx = rstd g - (rstd (sum g + xhat sum g xhat) - cmean - 2 (x - mean) cvar) / n
      float c0 = p.rms ? 0.f : -sum.a * rstd, c1 = -sum.b * rstd;
      if constexpr (!kPlain) c0 += s.cmean, c1 = fmaf(2.f * s.cvar, rstd > 0.f ? 1.f / rstd : 0.f, c1);
      c0 *= inv_n, c1 *= inv_n;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = (lane + k * group) * V, m = kKeep ? k : 0;
        if (j >= q.length) continue;
        if constexpr (!kKeep) {
          float w[V];
          row_values<T, kPlain>(p.a[kScale], q.scale, bs.scale, j, 1.f, w);
          read(k, j, xhat[0], g[0]);
#pragma unroll
          for (int e = 0; e < V; ++e) g[0][e] *= w[e];
        }
#pragma unroll
        for (int e = 0; e < V; ++e) g[m][e] = fmaf(g[m][e], rstd, fmaf(xhat[m][e], c1, c0));
        give(static_cast<T*>(p.a[kDx].data) + i + j, g[m]);
      }
    }
    at = at + 1 == kStages ? 0 : at + 1;
  }
  copies_wait<0>();
  if (partial == nullptr) return;

  float* const out = partial + (kGroup == kCluster ? team.row : static_cast<int64_t>(blockIdx.x)) * 2 * q.length;
  if constexpr (kGroup <= 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      if (j >= q.length) continue;
#pragma unroll
      for (int e = 0; e < V; e += 4) {
        *reinterpret_cast<float4*>(out + j + e) = {dscale[k][e], dscale[k][e + 1], dscale[k][e + 2], dscale[k][e + 3]};
        *reinterpret_cast<float4*>(out + q.length + j + e) = {dbias[k][e], dbias[k][e + 1], dbias[k][e + 2], dbias[k][e + 3]};
      }
    }
  } else {  // one thread per column adds the groups in turn
    float(*const sums)[256] = reinterpret_cast<float(*)[256]>(stage);  // [V][thread]
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float(&a)[V] = which == 0 ? dscale[k] : dbias[k];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; ++e) sums[e][threadIdx.x] = a[e];
        __syncthreads();
        for (int c = threadIdx.x; c < group * V; c += blockDim.x) {
          const int at = c % group, e = c / group, j = (at + k * group) * V + e;
          float s = 0.f;
          for (int m = 0; m < team.per; ++m) s += sums[e][m * group + at];
          if (j < q.length) out[static_cast<int64_t>(which) * q.length + j] = s;
        }
      }
    }
  }
}

// dscale and dbias from the blocks' sums: 32 columns, 32 threads for each.
template <class T>
__global__ void __launch_bounds__(1024) rows_sums(const __grid_constant__ Problem p, const float* partial, int64_t blocks, int length) {
  __shared__ float slot[2][32][33];
  const int x = threadIdx.x & 31, y = threadIdx.x >> 5, column = blockIdx.x * 32 + x;
  float s[2] = {0.f, 0.f};
  if (column < length) {
#pragma unroll 4
    for (int64_t b = y; b < blocks; b += 32) {
      s[0] += partial[b * 2 * length + column];
      s[1] += partial[(b * 2 + 1) * length + column];
    }
  }
  slot[0][y][x] = s[0], slot[1][y][x] = s[1];
#pragma unroll
  for (int half = 16; half > 0; half >>= 1) {
    __syncthreads();
    if (y < half) slot[0][y][x] += slot[0][y + half][x], slot[1][y][x] += slot[1][y + half][x];
  }
  if (y != 0 || column >= length) return;
  put<T>(p.a[kDscale], column, p.wide, slot[0][0][x]);
  put<T>(p.a[kDbias], column, p.wide, slot[1][0][x]);
}

}  // namespace

cudaError_t rows_add_sums(ffi::DataType dtype, const Problem& p, const RowPlan& q, const float* partial, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    rows_sums<decltype(zero)>
        <<<static_cast<unsigned>(ceil_div(q.length, 32)), 1024, 0, stream>>>(p, partial, q.blocks / q.cluster, q.length);
    return cudaGetLastError();
  });
}

cudaError_t rows_backward(ffi::DataType dtype, const Problem& p, const RowPlan& q, float* partial, bool sums, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    float* const to = sums ? partial : nullptr;
    const int bytes = stage_bytes(q.k, q.block);
    auto go = [&](auto plain, auto other) {
      return launch_rows(q.plain ? plain : other, q, bytes, stream, p, q, to);
    };
#define ROWS(group, k) go(rows_backward_held<T, group, k, true>, rows_backward_held<T, group, k, false>)
    constexpr int k8 = 8 / kVec<T>, k16 = 16 / kVec<T>, kWide = sizeof(T) == 4 ? k16 : 32 / kVec<T>;  // vectors of as many elements
#define PLAIN_ROWS(group, k) launch_rows(rows_backward_held<T, group, k, true>, q, bytes, stream, p, q, to)
    const cudaError_t e = q.group == 8    ? q.k == k8 ? ROWS(8, k8) : PLAIN_ROWS(8, k16)
                          : q.group == 32 ? q.k == k8 ? ROWS(32, k8) : PLAIN_ROWS(32, k16)
                          : q.cluster > 1 ? launch_rows(q.plain ? rows_backward_held<T, kCluster, kWide, true> : rows_backward_held<T, kCluster, k16, false>, q, bytes,
                                                          stream, p, q, to)
                          : q.k == k8     ? ROWS(kBlock, k8)
                          : q.k == k16    ? ROWS(kBlock, k16)
                                          : PLAIN_ROWS(kBlock, kWide);
#undef ROWS
#undef PLAIN_ROWS
    return e != cudaSuccess || !sums ? e : rows_add_sums(dtype, p, q, partial, stream);
  });
}

}  // namespace norm
}  // namespace jaxprims
