// softmax and log_softmax along an axis that is not the last: [outer, n, inner], by 16-byte vectors along inner.
//   softmax_row.cu's formulas.
// Work     a block of 256 threads: 8 lanes of a vector each, so 128 bytes of every row, times 32 rows at a time. Each thread
//          merges maximum and sum of its columns four rows at a time, the 32 shares merge in shared memory, then the strip is read
//          again. Few strips: a block for each chunk of the rows and three launches, as softmax_long.cu's; what the chunks tell
//          one another lies in the first rows of their parts of y.
// Sums     float32, in an order fixed by the shape.
// Cost     reads x twice, writes once. Bound: memory.
// Measured on an H200, bf16, share of a copy that reads once: 32768x4096 44 %, 1000000x128 43 %, 16000000x8 9 %.
#include "act/softmax_row.cuh"

namespace jaxprims {
namespace {

constexpr int kLanes = 8, kShares = 32, kThreads = kLanes * kShares;
constexpr int64_t kFill = 264;  // blocks below which the rows are cut
constexpr int kHead = 4;        // rows of y that hold a chunk's maximum and sum (float32: two)

template <class T>
struct Columns {  // maximum and sum of exp(x - maximum) of a vector of columns
  float m[kV<T>], s[kV<T>];
};

// x and y seen as vectors: [outer, n, width].
struct Grid {
  int64_t n, width, strips, chunks;
  __device__ __forceinline__ int64_t chunk_begin(int64_t c) const { return n * c / chunks; }
};
struct Place {
  int64_t vector, begin, end;  // index of the vector in the first row, rows of the chunk
  bool inside;
  __device__ __forceinline__ explicit Place(const Grid& g) {
    int64_t b = blockIdx.x;
    const int64_t chunk = b % g.chunks;
    b /= g.chunks;
    const int64_t outer = b / g.strips, column = (b - outer * g.strips) * kLanes + threadIdx.x % kLanes;
    inside = column < g.width;
    vector = outer * g.n * g.width + column;
    begin = g.chunk_begin(chunk), end = g.chunk_begin(chunk + 1);
  }
};

template <class T>
__device__ __forceinline__ void unpacked(const uint4& u, float (&v)[kV<T>]) {
  Pack<T, kV<T>> p;
  memcpy(&p, &u, 16);
#pragma unroll
  for (int i = 0; i < kV<T>; ++i) v[i] = to_float(p.v[i]);
}
template <class T>
__device__ __forceinline__ void merge(Columns<T>& a, const Columns<T>& b, bool accurate) {
#pragma unroll
  for (int i = 0; i < kV<T>; ++i) {
    const float top = accurate ? max_nan(a.m[i], b.m[i]) : 0.f;
    if (top != -kInf) a.s[i] = a.s[i] * exp_of<T>(a.m[i] - top) + b.s[i] * exp_of<T>(b.m[i] - top);
    a.m[i] = top;
  }
}

template <class T>
__device__ __forceinline__ Columns<T> gathered(const uint4* x, const Grid& g, const Place& at, bool accurate, Columns<T>* shares) {
  constexpr int V = kV<T>, kRows = 4;
  Columns<T> all;
#pragma unroll
  for (int i = 0; i < V; ++i) all.m[i] = accurate ? -kInf : 0.f, all.s[i] = 0.f;
  const int share = threadIdx.x / kLanes;
  if (at.inside) {
    for (int64_t r = at.begin + share; r < at.end; r += kRows * kShares) {
      uint4 u[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        if (r + k * kShares < at.end) u[k] = x[at.vector + (r + k * kShares) * g.width];
      float v[kRows][V];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        unpacked<T>(u[k], v[k]);
        if (r + k * kShares >= at.end)
#pragma unroll
          for (int i = 0; i < V; ++i) v[k][i] = -kInf;
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float top = all.m[i];
        if (accurate)
#pragma unroll
          for (int k = 0; k < kRows; ++k) top = max_nan(top, v[k][i]);
        if (top == -kInf) continue;  // nothing but -inf so far
        all.s[i] *= exp_of<T>(all.m[i] - top);
        all.m[i] = top;
#pragma unroll
        for (int k = 0; k < kRows; ++k) all.s[i] += exp_of<T>(v[k][i] - top);
      }
    }
  }
  shares[threadIdx.x] = all;
#pragma unroll 1
  for (int half = kThreads / 2; half >= kLanes; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) merge(shares[threadIdx.x], shares[threadIdx.x + half], accurate);
  }
  __syncthreads();
  return shares[threadIdx.x % kLanes];
}

template <class T, bool kLog>
__device__ __forceinline__ void written(const uint4* x, uint4* y, const Grid& g, const Place& at, const Columns<T>& all) {
  constexpr int V = kV<T>, kRows = 4;
  if (!at.inside) return;
  float scale[V];
#pragma unroll
  for (int i = 0; i < V; ++i) scale[i] = kLog ? logf(all.s[i]) : all.s[i];
  for (int64_t r = at.begin + threadIdx.x / kLanes; r < at.end; r += kRows * kShares) {
    uint4 u[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      if (r + k * kShares < at.end) u[k] = x[at.vector + (r + k * kShares) * g.width];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (r + k * kShares >= at.end) continue;
      float v[V];
      unpacked<T>(u[k], v);
      Pack<T, V> p;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float d = v[i] - all.m[i];
        p.v[i] = from_float<T>(kLog ? d - scale[i] : sizeof(T) == 4 ? exp_of<T>(d) / scale[i] : __fdividef(exp_of<T>(d), scale[i]));
      }
      memcpy(&u[k], &p, 16);
      y[at.vector + (r + k * kShares) * g.width] = u[k];
    }
  }
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kThreads, 2)
    softmax_strips(const uint4* __restrict__ x, uint4* __restrict__ y, const Grid g, bool accurate) {
  __shared__ Columns<T> shares[kThreads];
  const Place at(g);
  const Columns<T> all = gathered<T>(x, g, at, accurate, shares);
  written<T, kLog>(x, y, g, at, all);
}

// A chunk's head in y: 8 bytes a column.
template <class T>
__device__ __forceinline__ void put_head(uint4* y, const Grid& g, int64_t vector, int64_t begin, const Columns<T>& all) {
  uint4 parts[sizeof(all) / 16];
  memcpy(parts, &all, sizeof(all));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(all) / 16); ++i) y[vector + (begin + i) * g.width] = parts[i];
}
template <class T>
__device__ __forceinline__ Columns<T> get_head(const uint4* y, const Grid& g, int64_t vector, int64_t begin) {
  Columns<T> all;
  uint4 parts[sizeof(all) / 16];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(all) / 16); ++i) parts[i] = y[vector + (begin + i) * g.width];
  memcpy(&all, parts, sizeof(all));
  return all;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    strips_gather(const uint4* __restrict__ x, uint4* __restrict__ y, const Grid g, bool accurate) {
  __shared__ Columns<T> shares[kThreads];
  const Place at(g);
  const Columns<T> all = gathered<T>(x, g, at, accurate, shares);
  if (at.inside && threadIdx.x < kLanes) put_head<T>(y, g, at.vector, at.begin, all);
}
// A warp a vector of columns.
template <class T>
__global__ void __launch_bounds__(32) strips_join(uint4* __restrict__ y, const Grid g, bool accurate) {
  __shared__ Columns<T> shares[32];
  const int64_t outer = blockIdx.x / g.width, vector = outer * g.n * g.width + (blockIdx.x - outer * g.width);
  Columns<T> all;
#pragma unroll
  for (int i = 0; i < kV<T>; ++i) all.m[i] = accurate ? -kInf : 0.f, all.s[i] = 0.f;
  for (int64_t c = threadIdx.x; c < g.chunks; c += 32) merge(all, get_head<T>(y, g, vector, g.chunk_begin(c)), accurate);
  shares[threadIdx.x] = all;
  for (int half = 16; half > 0; half /= 2) {
    __syncwarp();
    if (threadIdx.x < half) merge(shares[threadIdx.x], shares[threadIdx.x + half], accurate);
  }
  __syncwarp();
  for (int64_t c = threadIdx.x; c < g.chunks; c += 32) put_head<T>(y, g, vector, g.chunk_begin(c), shares[0]);
}
template <class T, bool kLog>
__global__ void __launch_bounds__(kThreads, 2) strips_apply(const uint4* __restrict__ x, uint4* __restrict__ y, const Grid g) {
  const Place at(g);
  Columns<T> all{};
  if (at.inside) all = get_head<T>(y, g, at.vector, at.begin);
  __syncthreads();  // all have read what is now written over
  written<T, kLog>(x, y, g, at, all);
}

template <class T, bool kLog>
void launch_strips(const uint4* x, uint4* y, const Grid& g, int64_t outer, bool accurate, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(outer * g.strips * g.chunks);
  if (g.chunks == 1) {
    softmax_strips<T, kLog><<<grid, kThreads, 0, stream>>>(x, y, g, accurate);
    return;
  }
  strips_gather<T><<<grid, kThreads, 0, stream>>>(x, y, g, accurate);
  strips_join<T><<<static_cast<unsigned>(outer * g.width), 32, 0, stream>>>(y, g, accurate);
  strips_apply<T, kLog><<<grid, kThreads, 0, stream>>>(x, y, g);
}

}  // namespace

template <class T>
bool launch_softmax_columns(const T* x, T* y, const RowProblem& p, bool log, bool accurate, cudaStream_t stream, cudaError_t& e) {
  if (p.inner % kV<T> != 0 || p.n < 2 * kShares || reinterpret_cast<uintptr_t>(x) % 16 || reinterpret_cast<uintptr_t>(y) % 16) return false;
  Grid g;
  g.n = p.n, g.width = p.inner / kV<T>, g.strips = ceil_div(g.width, kLanes), g.chunks = 1;
  const int64_t blocks = p.outer * g.strips;
  if (blocks >= int64_t{1} << 28) return false;
  if (blocks < kFill && x != y) {
    g.chunks = std::min(ceil_div(2 * kFill, blocks), p.n / (8 * kShares));  // at least 8 rows a thread
    if (g.chunks < 2 || p.outer * g.width > 1 << 20) g.chunks = 1;
  }
  static_assert(kHead <= 8 * kShares, "a chunk holds its head");
  const auto from = reinterpret_cast<const uint4*>(x);
  const auto to = reinterpret_cast<uint4*>(y);
  if (log) launch_strips<T, true>(from, to, g, p.outer, accurate, stream);
  else launch_strips<T, false>(from, to, g, p.outer, accurate, stream);
  e = cudaGetLastError();
  return true;
}

#define JAXPRIMS_SOFTMAX_COLUMNS(T) \
  template bool launch_softmax_columns<T>(const T*, T*, const RowProblem&, bool, bool, cudaStream_t, cudaError_t&);
JAXPRIMS_SOFTMAX_COLUMNS(float)
JAXPRIMS_SOFTMAX_COLUMNS(__half)
JAXPRIMS_SOFTMAX_COLUMNS(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX_COLUMNS

}  // namespace jaxprims
