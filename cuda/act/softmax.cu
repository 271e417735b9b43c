// softmax and log_softmax along one axis of [outer, n, inner], and their tangents.
//   softmax          y_i = exp(x_i - m) / s            s = sum_j exp(x_j - m),  m = max_j x_j  (fast: m = 0)
//   log_softmax      y_i = x_i - m - log(s)
//   softmax_jvp      o_i = y_i * (t_i - sum_j y_j t_j)
//   log_softmax_jvp  o_i = t_i - sum_j exp(y_j) t_j
//   log_softmax_bwd  o_i = t_i - exp(y_i) * sum_j t_j
// A NaN or +inf in a row, or a row of -inf alone, makes the row NaN, as the formula does (log of the fast form likewise).
// Layout   row-major [outer, n, inner]; nothing is transposed.
// Work     inner = 1, n > 32, aligned: softmax_row.cu. Else one warp for a row up to 1024 elements, one block of 256
//          threads up to 8192, the row in registers; longer rows: one block, (m, s) merged in one online pass, then a second read to write.
//          inner > 1: threads along inner (neighbours in memory); one thread for a column up to 32 elements, in registers;
//          longer columns: a block of 32 x 8, eight threads share a column, two reads.
// Cost     n <= 8192 (32 strided): reads each operand once, writes once; else the operands are read twice. Bound: memory.
// Sums     float32, in an order fixed by the shape alone: the same bits in every run.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "act/softmax.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxprims {
namespace {

constexpr int kBlock = 256;      // threads of a block that owns a row
constexpr int kWarps = 8;        // rows of a block whose warps own one each
constexpr int kColumn = 32;      // longest column that one thread keeps in registers
constexpr int kWarpRow = 32;     // rows longer than a warp go by vectors (softmax_row.cu)
constexpr int kShare = 8;        // threads that share a longer column
constexpr int64_t kMaxGrid = int64_t{1} << 30;
constexpr float kInf = INFINITY;

int grid_of(int64_t blocks) { return static_cast<int>(std::min(blocks, kMaxGrid)); }

// --- the formulas, without thread indices -------------------------------------------------------------------------------

// exp without overflow of the argument's difference; exp(-inf) = 0, NaN passes.
struct Stat {  // maximum and sum of exp(x - max) of a set of numbers
  float m, s;
};
__device__ __forceinline__ Stat merge(Stat a, Stat b) {
  const float m = Max{}(a.m, b.m);
  if (m == -kInf) return {m, a.s + b.s};  // nothing but -inf so far: both sums are 0
  return {m, a.s * expf(a.m - m) + b.s * expf(b.m - m)};
}
// One more number. The sum of a set of -inf alone stays 0; x - m at the end makes such a row NaN.
__device__ __forceinline__ Stat push(Stat a, float x, bool accurate) {
  if (!accurate) return {0.f, a.s + expf(x)};
  if (x <= a.m) return a.m == -kInf ? a : Stat{a.m, a.s + expf(x - a.m)};  // false for NaN
  return merge(a, {x, x == x ? 1.f : x});
}
__device__ __forceinline__ float finish(float x, Stat a, bool log) {
  return log ? (x - a.m) - logf(a.s) : expf(x - a.m) / a.s;
}

__device__ __forceinline__ float pair_term(PairOp op, float y, float t) {
  return op == PairOp::kSoftmaxJvp ? y * t : op == PairOp::kLogSoftmaxJvp ? expf(y) * t : t;
}
__device__ __forceinline__ float pair_finish(PairOp op, float y, float t, float sum) {
  return op == PairOp::kSoftmaxJvp ? y * (t - sum) : op == PairOp::kLogSoftmaxJvp ? t - sum : t - expf(y) * sum;
}

// --- contiguous rows, in registers ----------------------------------------------------------------------------------------

// All threads of the row (a warp, or the block) get the result.
template <int kThreads, class F>
__device__ __forceinline__ float row_reduce(float v, float identity, F op, float* scratch) {
  if constexpr (kThreads == 32) return warp_reduce(v, op);
  return block_reduce(v, identity, op, scratch);
}

// kThreads threads own a row of at most kItems * kThreads elements.
template <class T, int kItems, int kThreads>
__global__ void __launch_bounds__(kBlock) softmax_row(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n,
                                                      bool log, bool accurate) {
  __shared__ float scratch[33];
  const int lane = threadIdx.x % kThreads;
  constexpr int per_block = kBlock / kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / kThreads; row < rows;
       row += static_cast<int64_t>(gridDim.x) * per_block) {
    const T* from = x + row * n;
    float v[kItems];
    float m = -kInf;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = lane + k * kThreads;
      v[k] = i < n ? to_float(from[i]) : -kInf;
      m = Max{}(m, v[k]);
    }
    m = accurate ? row_reduce<kThreads>(m, -kInf, Max{}, scratch) : 0.f;
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < kItems; ++k) s += lane + k * kThreads < n ? expf(v[k] - m) : 0.f;
    s = row_reduce<kThreads>(s, 0.f, Add{}, scratch);
    T* to = y + row * n;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = lane + k * kThreads;
      if (i < n) to[i] = from_float<T>(finish(v[k], {m, s}, log));
    }
  }
}

template <class T, int kItems, int kThreads>
__global__ void __launch_bounds__(kBlock) softmax_pair_row(PairOp op, const T* __restrict__ y, const T* __restrict__ t,
                                                           T* __restrict__ out, int64_t rows, int n, Lead lead) {
  __shared__ float scratch[33];
  const int lane = threadIdx.x % kThreads;
  constexpr int per_block = kBlock / kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / kThreads; row < rows;
       row += static_cast<int64_t>(gridDim.x) * per_block) {
    const T* py = y + lead.at(0, row) * n;
    const T* pt = t + lead.at(1, row) * n;
    float a[kItems], b[kItems];
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = lane + k * kThreads;
      a[k] = i < n ? to_float(py[i]) : 0.f;
      b[k] = i < n ? to_float(pt[i]) : 0.f;
      sum += pair_term(op, a[k], b[k]);
    }
    sum = row_reduce<kThreads>(sum, 0.f, Add{}, scratch);
    T* to = out + row * n;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = lane + k * kThreads;
      if (i < n) to[i] = from_float<T>(pair_finish(op, a[k], b[k], sum));
    }
  }
}

// --- contiguous rows too long for registers ---------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kBlock) softmax_long_row(const T* __restrict__ x, T* __restrict__ y, int64_t rows,
                                                           int64_t n, bool log, bool accurate) {
  __shared__ float scratch[33];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * n;
    Stat a{accurate ? -kInf : 0.f, 0.f};
    for (int64_t i = threadIdx.x; i < n; i += kBlock) a = push(a, to_float(from[i]), accurate);
    const float m = block_reduce(a.m, -kInf, Max{}, scratch);
    const float part = a.m == -kInf ? a.s : a.s * expf(a.m - m);
    const Stat all{m, block_reduce(part, 0.f, Add{}, scratch)};
    T* to = y + row * n;
    for (int64_t i = threadIdx.x; i < n; i += kBlock) to[i] = from_float<T>(finish(to_float(from[i]), all, log));
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) softmax_pair_long_row(PairOp op, const T* __restrict__ y,
                                                                const T* __restrict__ t, T* __restrict__ out,
                                                                int64_t rows, int64_t n, Lead lead) {
  __shared__ float scratch[33];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* py = y + lead.at(0, row) * n;
    const T* pt = t + lead.at(1, row) * n;
    float sum = 0.f;
    for (int64_t i = threadIdx.x; i < n; i += kBlock) sum += pair_term(op, to_float(py[i]), to_float(pt[i]));
    sum = block_reduce(sum, 0.f, Add{}, scratch);
    T* to = out + row * n;
    for (int64_t i = threadIdx.x; i < n; i += kBlock)
      to[i] = from_float<T>(pair_finish(op, to_float(py[i]), to_float(pt[i]), sum));
  }
}

// --- strided: threads along inner ---------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kBlock) softmax_column(const T* __restrict__ x, T* __restrict__ y, RowProblem p,
                                                         bool log, bool accurate) {
  const int n = static_cast<int>(p.n);
  const int64_t columns = p.outer * p.inner;
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; c < columns;
       c += static_cast<int64_t>(gridDim.x) * kBlock) {
    const int64_t o = c / p.inner, base = o * p.n * p.inner + (c - o * p.inner);
    float v[kColumn];
    float m = -kInf, s = 0.f;
#pragma unroll
    for (int k = 0; k < kColumn; ++k) {
      v[k] = k < n ? to_float(x[base + k * p.inner]) : -kInf;
      m = Max{}(m, v[k]);
    }
    if (!accurate) m = 0.f;
#pragma unroll
    for (int k = 0; k < kColumn; ++k) s += k < n ? expf(v[k] - m) : 0.f;
#pragma unroll
    for (int k = 0; k < kColumn; ++k)
      if (k < n) y[base + k * p.inner] = from_float<T>(finish(v[k], {m, s}, log));
  }
}

// blockDim = (32, kShare): threadIdx.x along inner, threadIdx.y along n.
template <class T>
__global__ void __launch_bounds__(32 * kShare) softmax_long_column(const T* __restrict__ x, T* __restrict__ y,
                                                                   RowProblem p, bool log, bool accurate) {
  __shared__ Stat parts[kShare][32];
  const int64_t tiles = ceil_div(p.inner, 32);
  for (int64_t tile = blockIdx.x; tile < p.outer * tiles; tile += gridDim.x) {
    const int64_t o = tile / tiles, j = (tile - o * tiles) * 32 + threadIdx.x;
    const int64_t base = o * p.n * p.inner + j;
    const bool inside = j < p.inner;
    Stat a{accurate ? -kInf : 0.f, 0.f};
    if (inside)
#pragma unroll 1
      for (int64_t i = threadIdx.y; i < p.n; i += kShare) a = push(a, to_float(x[base + i * p.inner]), accurate);
    __syncthreads();  // the parts of the tile before may still be read
    parts[threadIdx.y][threadIdx.x] = a;
    __syncthreads();
    Stat all = parts[0][threadIdx.x];
    for (int k = 1; k < kShare; ++k) all = merge(all, parts[k][threadIdx.x]);
    if (inside)
      for (int64_t i = threadIdx.y; i < p.n; i += kShare)
        y[base + i * p.inner] = from_float<T>(finish(to_float(x[base + i * p.inner]), all, log));
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kShare) softmax_pair_column(PairOp op, const T* __restrict__ y,
                                                                   const T* __restrict__ t, T* __restrict__ out,
                                                                   RowProblem p, Lead lead) {
  __shared__ float parts[kShare][32];
  const int64_t tiles = ceil_div(p.inner, 32), image = p.n * p.inner;
  for (int64_t tile = blockIdx.x; tile < p.outer * tiles; tile += gridDim.x) {
    const int64_t o = tile / tiles, j = (tile - o * tiles) * 32 + threadIdx.x;
    const T* py = y + lead.at(0, o) * image + j;
    const T* pt = t + lead.at(1, o) * image + j;
    const bool inside = j < p.inner;
    float sum = 0.f;
    if (inside)
      for (int64_t i = threadIdx.y; i < p.n; i += kShare)
        sum += pair_term(op, to_float(py[i * p.inner]), to_float(pt[i * p.inner]));
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = 0.f;
    for (int k = 0; k < kShare; ++k) sum += parts[k][threadIdx.x];
    T* to = out + o * image + j;
    if (inside)
      for (int64_t i = threadIdx.y; i < p.n; i += kShare)
        to[i * p.inner] = from_float<T>(pair_finish(op, to_float(py[i * p.inner]), to_float(pt[i * p.inner]), sum));
  }
}

}  // namespace

// --- launchers --------------------------------------------------------------------------------------------------------

template <class T>
cudaError_t launch_softmax(const T* x, T* y, const RowProblem& p, bool log, bool accurate, cudaStream_t stream) {
  if (p.outer == 0 || p.n == 0 || p.inner == 0) return cudaSuccess;
  const int warp_grid = grid_of(ceil_div(p.outer, kWarps)), row_grid = grid_of(p.outer);
  const int n = static_cast<int>(std::min<int64_t>(p.n, 1 << 30));
  if (cudaError_t e; p.inner == 1 && p.n > kWarpRow && launch_softmax_rows(x, y, p.outer, p.n, log, accurate, stream, e)) return e;
  if (p.inner > 1) {
    if (p.n <= kColumn)
      softmax_column<T><<<grid_of(ceil_div(p.outer * p.inner, kBlock)), kBlock, 0, stream>>>(x, y, p, log, accurate);
    else
      softmax_long_column<T><<<grid_of(p.outer * ceil_div(p.inner, 32)), dim3(32, kShare), 0, stream>>>(x, y, p, log, accurate);
  } else if (p.n <= kWarpRow) {
    softmax_row<T, 1, 32><<<warp_grid, kBlock, 0, stream>>>(x, y, p.outer, n, log, accurate);
  } else if (p.n <= 256) {
    softmax_row<T, 8, 32><<<warp_grid, kBlock, 0, stream>>>(x, y, p.outer, n, log, accurate);
  } else if (p.n <= 1024) {
    softmax_row<T, 32, 32><<<warp_grid, kBlock, 0, stream>>>(x, y, p.outer, n, log, accurate);
  } else if (p.n <= 32 * kBlock) {
    softmax_row<T, 32, kBlock><<<row_grid, kBlock, 0, stream>>>(x, y, p.outer, n, log, accurate);
  } else {
    softmax_long_row<T><<<row_grid, kBlock, 0, stream>>>(x, y, p.outer, p.n, log, accurate);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_softmax_pair(PairOp op, const T* y, const T* t, T* out, const RowProblem& p, const Lead& lead,
                                cudaStream_t stream) {
  if (p.outer == 0 || p.n == 0 || p.inner == 0) return cudaSuccess;
  const int warp_grid = grid_of(ceil_div(p.outer, kWarps)), row_grid = grid_of(p.outer);
  const int n = static_cast<int>(std::min<int64_t>(p.n, 1 << 30));
  if (cudaError_t e; p.inner == 1 && p.n > kWarpRow && launch_softmax_pair_rows(op, y, t, out, p.outer, p.n, lead, stream, e)) return e;
  if (p.inner > 1) {
    softmax_pair_column<T><<<grid_of(p.outer * ceil_div(p.inner, 32)), dim3(32, kShare), 0, stream>>>(op, y, t, out, p, lead);
  } else if (p.n <= kWarpRow) {
    softmax_pair_row<T, 1, 32><<<warp_grid, kBlock, 0, stream>>>(op, y, t, out, p.outer, n, lead);
  } else if (p.n <= 256) {
    softmax_pair_row<T, 8, 32><<<warp_grid, kBlock, 0, stream>>>(op, y, t, out, p.outer, n, lead);
  } else if (p.n <= 1024) {
    softmax_pair_row<T, 32, 32><<<warp_grid, kBlock, 0, stream>>>(op, y, t, out, p.outer, n, lead);
  } else if (p.n <= 32 * kBlock) {
    softmax_pair_row<T, 32, kBlock><<<row_grid, kBlock, 0, stream>>>(op, y, t, out, p.outer, n, lead);
  } else {
    softmax_pair_long_row<T><<<row_grid, kBlock, 0, stream>>>(op, y, t, out, p.outer, p.n, lead);
  }
  return cudaGetLastError();
}

#define JAXPRIMS_SOFTMAX(T)                                                                                       \
  template cudaError_t launch_softmax<T>(const T*, T*, const RowProblem&, bool, bool, cudaStream_t);              \
  template cudaError_t launch_softmax_pair<T>(PairOp, const T*, const T*, T*, const RowProblem&, const Lead&, cudaStream_t);
JAXPRIMS_SOFTMAX(float)
JAXPRIMS_SOFTMAX(__half)
JAXPRIMS_SOFTMAX(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX

}  // namespace jaxprims
