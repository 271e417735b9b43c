// softmax, log_softmax and their tangents over contiguous rows, by 16-byte vectors: softmax.cu's formulas, one read, one write.
//   softmax          y_i = exp(x_i - m) / s            s = sum_j exp(x_j - m),  m = max_j x_j  (fast: m = 0)
//   log_softmax      y_i = x_i - m - log(s)
//   softmax_jvp      o_i = y_i * (t_i - sum_j y_j t_j)
//   log_softmax_jvp  o_i = t_i - sum_j exp(y_j) t_j
//   log_softmax_bwd  o_i = t_i - exp(y_i) * sum_j t_j
// Layout   row-major [rows, n], every array aligned to 16 bytes. A row may start anywhere: it is walked by the aligned vectors
//          that it touches, of which the first and the last may be its own only in part; those go element by element.
// Work     select.h `row_shape`: a warp for a row up to 1024 elements; a block of 256 or 1024 threads up to 32768 (pairs of
//          operands 16384); the row stays in registers. Longer: a block of 512 threads, maximum and sum merged vector by vector,
//          then the row is read again, from L2 as long as the rows at work fit in it.
// Cost     reads each operand once, writes once; longer rows read twice. Bound: memory.
// Measured on an H200, bf16, share of a copy (4.08 TB/s in that run), before (one element at a time) and now:
//          softmax 32768x4096 24 % (0.517 ms), 67 % (0.196 ms); its tangent 57 % (0.335 ms), 65 % (0.303 ms).
//          Now: 131072x1000 69 % and 49 %; log_softmax 4096x50257 58 %, its backward 64 %.
// Sums     float32, in an order fixed by shape and row. Half types take the hardware's exp2 and one reciprocal of s: relative
//          errors below 2^-16, far below theirs; float32 has expf and divides.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "act/select.h"
#include "act/softmax.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxprims {
namespace {

constexpr float kInf = INFINITY;
constexpr int kLongBlock = 512;
// Blocks of 256 threads on an SM at once: what 64 registers a thread allow; ptxas spills one instance there before sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResident = 3;
#else
constexpr int kResident = 4;
#endif

template <class T>
constexpr int kV = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ float exp_of(float x) {
  if constexpr (sizeof(T) == 4) return expf(x);
  else return __expf(x);
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

template <int kThreads, class F>
__device__ __forceinline__ float row_reduce(float v, float identity, F op, float* scratch) {
  if constexpr (kThreads == 32) return warp_reduce(v, op);
  else return block_reduce(v, identity, op, scratch);
}

template <int kThreads>
constexpr int kBlock = kThreads == 32 ? 256 : kThreads;

template <class T, bool kLog, int kThreads, int K>
__global__ void __launch_bounds__(kBlock<kThreads>, kThreads == 1024 ? 1 : kResident)
    softmax_vectors(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, bool accurate) {
  constexpr int V = kV<T>;
  __shared__ float scratch[33];
  const int lane = threadIdx.x % kThreads;
  constexpr int per_block = kBlock<kThreads> / kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / kThreads; row < rows;
       row += static_cast<int64_t>(gridDim.x) * per_block) {
    const Frame<T, int> f(row * n, n);
    const T* from = x + row * n;
    Pack<T, V> raw[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * kThreads;
      if (at < f.vectors) {
        raw[k] = read(from, f, at, from_float<T>(-kInf));
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) raw[k].v[v] = from_float<T>(-kInf);
      }
    }
    float value[K][V], m = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) value[k][v] = to_float(raw[k].v[v]);
    if (accurate) {
      m = -kInf;
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) m = max_nan(m, value[k][v]);
      m = row_reduce<kThreads>(m, -kInf, MaxNan{}, scratch);
    }
    // What is not the row's is -inf: its exp is 0, but NaN where m is -inf, and then the row is NaN by the formula anyway.
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float e = exp_of<T>(value[k][v] - m);
        s += e;
        if constexpr (!kLog) value[k][v] = e;
      }
    s = row_reduce<kThreads>(s, 0.f, Add{}, scratch);
    const float log_s = kLog ? logf(s) : 0.f, inverse = kLog ? 0.f : 1.f / s;
    T* to = y + row * n;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * kThreads;
      if (at >= f.vectors) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kLog) value[k][v] = (value[k][v] - m) - log_s;
        else if constexpr (sizeof(T) == 4) value[k][v] = value[k][v] / s;
        else value[k][v] *= inverse;
      }
      write(to, f, at, value[k]);
    }
  }
}

template <class T, PairOp kOp>
__device__ __forceinline__ float pair_term(float y, float t) {
  return kOp == PairOp::kSoftmaxJvp ? y * t : kOp == PairOp::kLogSoftmaxJvp ? exp_of<T>(y) * t : t;
}
template <class T, PairOp kOp>
__device__ __forceinline__ float pair_finish(float y, float t, float sum) {
  return kOp == PairOp::kSoftmaxJvp ? y * (t - sum) : kOp == PairOp::kLogSoftmaxJvp ? t - sum : t - exp_of<T>(y) * sum;
}

template <class T, PairOp kOp, int kThreads, int K>
__global__ void __launch_bounds__(kBlock<kThreads>, kThreads == 1024 ? 1 : 2)
    pair_vectors(const T* __restrict__ y, const T* __restrict__ t, T* __restrict__ out, int64_t rows, int n, Lead lead) {
  constexpr int V = kV<T>;
  __shared__ float scratch[33];
  const int lane = threadIdx.x % kThreads;
  constexpr int per_block = kBlock<kThreads> / kThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * per_block + threadIdx.x / kThreads; row < rows;
       row += static_cast<int64_t>(gridDim.x) * per_block) {
    const Frame<T, int> f(row * n, n);  // the launcher saw to it that rows of all three start alike
    const T* py = y + lead.at(0, row) * n;
    const T* pt = t + lead.at(1, row) * n;
    Pack<T, V> a[K], b[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * kThreads;
      if (at < f.vectors) {
        a[k] = read(py, f, at, from_float<T>(0.f));
        b[k] = read(pt, f, at, from_float<T>(0.f));
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) a[k].v[v] = b[k].v[v] = from_float<T>(0.f);
      }
    }
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) sum += pair_term<T, kOp>(to_float(a[k].v[v]), to_float(b[k].v[v]));
    sum = row_reduce<kThreads>(sum, 0.f, Add{}, scratch);
    T* to = out + row * n;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * kThreads;
      if (at >= f.vectors) continue;
      float value[V];
#pragma unroll
      for (int v = 0; v < V; ++v) value[v] = pair_finish<T, kOp>(to_float(a[k].v[v]), to_float(b[k].v[v]), sum);
      write(to, f, at, value);
    }
  }
}

// --- rows too long for registers ------------------------------------------------------------------------------------------

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

template <class T, bool kLog>
__global__ void __launch_bounds__(kLongBlock, 2)
    softmax_long(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t n, bool accurate) {
  constexpr int V = kV<T>;
  __shared__ float scratch[33];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Frame<T, int64_t> f(row * n, n);
    const T* from = x + row * n;
    T* to = y + row * n;
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
    s = block_reduce(m == -kInf ? s : s * exp_of<T>(m - all), 0.f, Add{}, scratch);
    const float log_s = kLog ? logf(s) : 0.f, inverse = kLog ? 0.f : 1.f / s;
    walk<4>(from, f, from_float<T>(0.f), [&](const Pack<T, V>& p, int64_t k) {
      float value[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float d = to_float(p.v[v]) - all;
        if constexpr (kLog) value[v] = d - log_s;
        else if constexpr (sizeof(T) == 4) value[v] = exp_of<T>(d) / s;
        else value[v] = exp_of<T>(d) * inverse;
      }
      write(to, f, k, value);
    });
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

// --- launchers --------------------------------------------------------------------------------------------------------------

bool aligned(std::initializer_list<const void*> arrays) {
  for (const void* p : arrays)
    if (reinterpret_cast<uintptr_t>(p) % 16) return false;
  return true;
}

unsigned grid_of(int64_t blocks) { return static_cast<unsigned>(std::min(blocks, int64_t{1} << 30)); }

// f(threads, vectors) with the shape as compile-time numbers.
template <int V, bool kPair, class F>
void by_shape(RowShape s, F&& f) {
  using std::integral_constant;
  constexpr int few = 16 / V, many = 32 / V, most = kPair ? few : many;
  if (s.threads == 32 && s.vectors == 1) f(integral_constant<int, 32>{}, integral_constant<int, 1>{});
  else if (s.threads == 32) f(integral_constant<int, 32>{}, integral_constant<int, many>{});
  else if (s.threads == 256 && s.vectors == few) f(integral_constant<int, 256>{}, integral_constant<int, few>{});
  else if (s.threads == 256) f(integral_constant<int, 256>{}, integral_constant<int, many>{});
  else f(integral_constant<int, 1024>{}, integral_constant<int, most>{});
}

template <class T, bool kLog>
void launch_forward(const T* x, T* y, int64_t rows, int64_t n, bool accurate, cudaStream_t stream) {
  const RowShape shape = row_shape(n, kV<T>, false);
  if (shape.threads == 0) {
    softmax_long<T, kLog><<<grid_of(rows), kLongBlock, 0, stream>>>(x, y, rows, n, accurate);
    return;
  }
  by_shape<kV<T>, false>(shape, [&](auto threads, auto vectors) {
    constexpr int kThreads = decltype(threads)::value, K = decltype(vectors)::value;
    const unsigned grid = grid_of(ceil_div(rows, kBlock<kThreads> / kThreads));
    softmax_vectors<T, kLog, kThreads, K><<<grid, kBlock<kThreads>, 0, stream>>>(x, y, rows, static_cast<int>(n), accurate);
  });
}

template <class T, PairOp kOp>
void launch_pair(const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream) {
  const RowShape shape = row_shape(n, kV<T>, true);
  if (shape.threads == 0) {
    pair_long<T, kOp><<<grid_of(rows), kLongBlock, 0, stream>>>(y, t, out, rows, n, lead);
    return;
  }
  by_shape<kV<T>, true>(shape, [&](auto threads, auto vectors) {
    constexpr int kThreads = decltype(threads)::value, K = decltype(vectors)::value;
    const unsigned grid = grid_of(ceil_div(rows, kBlock<kThreads> / kThreads));
    pair_vectors<T, kOp, kThreads, K><<<grid, kBlock<kThreads>, 0, stream>>>(y, t, out, rows, static_cast<int>(n), lead);
  });
}

}  // namespace

template <class T>
bool launch_softmax_rows(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream) {
  if (!aligned({x, y})) return false;
  if (log) launch_forward<T, true>(x, y, rows, n, accurate, stream);
  else launch_forward<T, false>(x, y, rows, n, accurate, stream);
  return true;
}

template <class T>
bool launch_softmax_pair_rows(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream) {
  if (!aligned({y, t, out}) || (lead.axes && n % kV<T>)) return false;
  switch (op) {
    case PairOp::kSoftmaxJvp: launch_pair<T, PairOp::kSoftmaxJvp>(y, t, out, rows, n, lead, stream); break;
    case PairOp::kLogSoftmaxJvp: launch_pair<T, PairOp::kLogSoftmaxJvp>(y, t, out, rows, n, lead, stream); break;
    case PairOp::kLogSoftmaxBwd: launch_pair<T, PairOp::kLogSoftmaxBwd>(y, t, out, rows, n, lead, stream); break;
  }
  return true;
}

#define JAXPRIMS_SOFTMAX_ROWS(T)                                                                          \
  template bool launch_softmax_rows<T>(const T*, T*, int64_t, int64_t, bool, bool, cudaStream_t);         \
  template bool launch_softmax_pair_rows<T>(PairOp, const T*, const T*, T*, int64_t, int64_t, const Lead&, cudaStream_t);
JAXPRIMS_SOFTMAX_ROWS(float)
JAXPRIMS_SOFTMAX_ROWS(__half)
JAXPRIMS_SOFTMAX_ROWS(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX_ROWS

}  // namespace jaxprims
