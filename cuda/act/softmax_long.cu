// softmax, log_softmax and their tangents over contiguous rows that registers do not hold: two reads.
//   softmax_row.cu's formulas, layout and vectors.
// Work     many rows: a block of 512 threads a row; maximum and sum are merged vector by vector, then the row is read again, from
//          L2 as long as the rows at work fit in it. Few rows (at most 64): a block for each chunk of a row, three launches,
//          without a workspace: what the chunks tell one another lies in y until it is overwritten.
// Sums     float32, in an order fixed by the shape.
// Cost     reads each operand twice, writes once. Bound: memory, L2 for the second read.
// Measured on an H200, bf16: 1024x131072 53 % of a copy, log_softmax 53 %; one row of 1,000,000 15 us, of 16,000,000 64 us (24 %).
#include "act/softmax_row.cuh"
#include "common/reduce.cuh"

namespace jaxprims {
namespace {

constexpr int kLongBlock = 512;
constexpr int64_t kLeastChunk = 8192, kManyBlocks = 528;  // elements of a row's chunk, and blocks that fill a GPU

// use(pack, k) for every vector of the row that is this thread's, kAhead loads at a time.
template <int kAhead, class T, class F>
__device__ __forceinline__ void walk(const T* row, const Frame<T, int64_t>& f, T fill, F&& use) {
  int64_t k = threadIdx.x;
  for (; k + (kAhead - 1) * kLongBlock < f.vectors; k += kAhead * kLongBlock) {
    Pack<T, kV<T>> p[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) p[i] = read(row, f, k + i * kLongBlock, fill);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) use(p[i], k + i * kLongBlock);
  }
#pragma unroll 1
  for (; k < f.vectors; k += kLongBlock) use(read(row, f, k, fill), k);
}

// Maximum and sum of exp(x - maximum) of a block's elements.
template <class T>
__device__ __forceinline__ float2 gathered(const T* from, const Frame<T, int64_t>& f, bool accurate, float* scratch) {
  constexpr int V = kV<T>;
  float m = accurate ? -kInf : 0.f, s = 0.f;
  walk<4>(from, f, from_float<T>(-kInf), [&](const Pack<T, V>& p, int64_t) {
    float value[V], top = m;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      value[v] = to_float(p.v[v]);
      if (accurate) top = max_nan(top, value[v]);
    }
    if (top == -kInf) return;  // nothing but -inf so far
    if (top != m) s *= exp_of<T>(m - top);
    m = top;
#pragma unroll
    for (int v = 0; v < V; ++v) s += exp_of<T>(value[v] - m);
  });
  const float all = accurate ? block_reduce(m, -kInf, MaxNan{}, scratch) : 0.f;
  return {all, block_reduce(m == -kInf ? s : s * exp_of<T>(m - all), 0.f, Add{}, scratch)};
}

template <class T, bool kLog>
__device__ __forceinline__ void written(const T* from, T* to, const Frame<T, int64_t>& f, float m, float s) {
  constexpr int V = kV<T>;
  const float log_s = kLog ? logf(s) : 0.f;
  const Divider<T> divided(s);
  walk<4>(from, f, from_float<T>(0.f), [&](const Pack<T, V>& p, int64_t k) {
    float value[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float d = to_float(p.v[v]) - m;
      if constexpr (kLog) value[v] = d - log_s;
      else value[v] = divided(exp_of<T>(d));
    }
    write(to, f, k, value);
  });
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock, 2)
    softmax_long(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t n, bool accurate) {
  __shared__ float scratch[33];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Frame<T, int64_t> f(row * n, n);
    const float2 all = gathered(x + row * n, f, accurate, scratch);
    written<T, kLog>(x + row * n, y + row * n, f, all.x, all.y);
  }
}

template <class T, PairOp kOp>
__global__ void __launch_bounds__(kLongBlock, 2)
    pair_long(const T* __restrict__ y, const T* __restrict__ t, T* __restrict__ out, int64_t rows, int64_t n, Lead lead) {
  constexpr int V = kV<T>;
  __shared__ float scratch[33];
  const T zero = from_float<T>(0.f);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Frame<T, int64_t> f(row * n, n);
    const T* py = y + lead.at(0, row) * n;
    const T* pt = t + lead.at(1, row) * n;
    T* to = out + row * n;
    float sum = 0.f;
    walk<2>(pt, f, zero, [&](const Pack<T, V>& b, int64_t k) {
      Pack<T, V> a = b;
      if constexpr (kOp != PairOp::kLogSoftmaxBwd) a = read(py, f, k, zero);
#pragma unroll
      for (int v = 0; v < V; ++v) sum += pair_term<T, kOp>(to_float(a.v[v]), to_float(b.v[v]));
    });
    sum = block_reduce(sum, 0.f, Add{}, scratch);
    walk<2>(pt, f, zero, [&](const Pack<T, V>& b, int64_t k) {
      Pack<T, V> a = b;
      if constexpr (kOp != PairOp::kLogSoftmaxJvp) a = read(py, f, k, zero);
      float value[V];
#pragma unroll
      for (int v = 0; v < V; ++v) value[v] = pair_finish<T, kOp>(to_float(a.v[v]), to_float(b.v[v]), sum);
      write(to, f, k, value);
    });
  }
}

// --- few rows too long for registers: a block for each chunk of a row -------------------------------------------------------
//
// What a chunk gives to the others, its maximum and sum, lies in the first elements of its part of y until y is written: gather
// puts it there, join reads all of a row's and puts the row's in their place, apply's block reads its own and writes over it.

// Where chunk c of a row begins; all are longer than 8 bytes.
__device__ __forceinline__ int64_t chunk_begin(int64_t n, int64_t chunks, int64_t c) { return c == chunks ? n : n * c / chunks / 64 * 64; }
struct Chunk {
  int64_t first, length;  // of the block's, in elements of the array
  __device__ __forceinline__ Chunk(int64_t n, int64_t chunks) {
    const int64_t row = blockIdx.x / chunks, c = blockIdx.x - row * chunks, begin = chunk_begin(n, chunks, c);
    first = row * n + begin, length = chunk_begin(n, chunks, c + 1) - begin;
  }
};
template <class T>
__device__ __forceinline__ void put_stat(T* at, float m, float s) {
  const float both[2] = {m, s};
  T parts[8 / sizeof(T)];
  memcpy(parts, both, 8);
#pragma unroll
  for (int i = 0; i < static_cast<int>(8 / sizeof(T)); ++i) at[i] = parts[i];
}
template <class T>
__device__ __forceinline__ float2 get_stat(const T* at) {
  T parts[8 / sizeof(T)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(8 / sizeof(T)); ++i) parts[i] = at[i];
  float2 both;
  memcpy(&both, parts, 8);
  return both;
}

template <class T>
__global__ void __launch_bounds__(kLongBlock, 2)
    softmax_gather(const T* __restrict__ x, T* __restrict__ y, int64_t n, int64_t chunks, bool accurate) {
  __shared__ float scratch[33];
  const Chunk c(n, chunks);
  const int64_t first = c.first;
  const float2 got = gathered(x + first, Frame<T, int64_t>(first, c.length), accurate, scratch);
  if (threadIdx.x == 0) put_stat(y + first, got.x, got.y);
}

template <class T>
__global__ void __launch_bounds__(kLongBlock)
    softmax_join(T* __restrict__ y, int64_t n, int64_t chunks, bool accurate) {
  __shared__ float scratch[33];
  T* const to = y + blockIdx.x * n;
  float m = accurate ? -kInf : 0.f, s = 0.f;
  for (int64_t c = threadIdx.x; c < chunks; c += kLongBlock) {
    const float2 got = get_stat(to + chunk_begin(n, chunks, c));
    const float top = accurate ? max_nan(m, got.x) : 0.f;
    if (top != -kInf) s = s * (m == top ? 1.f : expf(m - top)) + got.y * (got.x == top ? 1.f : expf(got.x - top));
    m = top;
  }
  const float all = accurate ? block_reduce(m, -kInf, MaxNan{}, scratch) : 0.f;
  s = block_reduce(m == all ? s : s * expf(m - all), 0.f, Add{}, scratch);
  for (int64_t c = threadIdx.x; c < chunks; c += kLongBlock) put_stat(to + chunk_begin(n, chunks, c), all, s);
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock, 2)
    softmax_apply(const T* __restrict__ x, T* __restrict__ y, int64_t n, int64_t chunks) {
  const Chunk c(n, chunks);
  const int64_t first = c.first;
  const float2 stat = get_stat(y + first);
  __syncthreads();  // all have read what is now written over
  written<T, kLog>(x + first, y + first, Frame<T, int64_t>(first, c.length), stat.x, stat.y);
}

// --- launchers --------------------------------------------------------------------------------------------------------------

// Rows that no shape holds, few of them: how many chunks of a row have a block each; 1: the row has one.
int64_t chunks_of(int64_t rows, int64_t n, bool apart) {
  if (!apart || rows > 64) return 1;
  return std::min<int64_t>(n / kLeastChunk, ceil_div(kManyBlocks, rows));
}

template <class T, bool kLog>
void launch_long(const T* x, T* y, int64_t rows, int64_t n, bool accurate, cudaStream_t stream) {
  const int64_t chunks = chunks_of(rows, n, x != y);
  if (chunks < 2) {
    softmax_long<T, kLog><<<grid_of(rows), kLongBlock, 0, stream>>>(x, y, rows, n, accurate);
    return;
  }
  const unsigned grid = grid_of(rows * chunks);
  softmax_gather<T><<<grid, kLongBlock, 0, stream>>>(x, y, n, chunks, accurate);
  softmax_join<T><<<grid_of(rows), kLongBlock, 0, stream>>>(y, n, chunks, accurate);
  softmax_apply<T, kLog><<<grid, kLongBlock, 0, stream>>>(x, y, n, chunks);
}

}  // namespace

template <class T>
cudaError_t launch_softmax_long(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream) {
  if (log) launch_long<T, true>(x, y, rows, n, accurate, stream);
  else launch_long<T, false>(x, y, rows, n, accurate, stream);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_softmax_pair_long(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream) {
  const unsigned grid = grid_of(rows);
  switch (op) {
    case PairOp::kSoftmaxJvp: pair_long<T, PairOp::kSoftmaxJvp><<<grid, kLongBlock, 0, stream>>>(y, t, out, rows, n, lead); break;
    case PairOp::kLogSoftmaxJvp: pair_long<T, PairOp::kLogSoftmaxJvp><<<grid, kLongBlock, 0, stream>>>(y, t, out, rows, n, lead); break;
    case PairOp::kLogSoftmaxBwd: pair_long<T, PairOp::kLogSoftmaxBwd><<<grid, kLongBlock, 0, stream>>>(y, t, out, rows, n, lead); break;
  }
  return cudaGetLastError();
}

#define JAXPRIMS_SOFTMAX_LONG(T)                                                                              \
  template cudaError_t launch_softmax_long<T>(const T*, T*, int64_t, int64_t, bool, bool, cudaStream_t);      \
  template cudaError_t launch_softmax_pair_long<T>(PairOp, const T*, const T*, T*, int64_t, int64_t, const Lead&, cudaStream_t);
JAXPRIMS_SOFTMAX_LONG(float)
JAXPRIMS_SOFTMAX_LONG(__half)
JAXPRIMS_SOFTMAX_LONG(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX_LONG

}  // namespace jaxprims
