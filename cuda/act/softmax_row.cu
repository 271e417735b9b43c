// softmax, log_softmax and their tangents over contiguous rows, by 16-byte vectors: softmax.cu's formulas, one read, one write.
//   softmax          y_i = exp(x_i - m) / s            s = sum_j exp(x_j - m),  m = max_j x_j  (fast: m = 0)
//   log_softmax      y_i = x_i - m - log(s)
//   softmax_jvp      o_i = y_i * (t_i - sum_j y_j t_j)
//   log_softmax_jvp  o_i = t_i - sum_j exp(y_j) t_j
//   log_softmax_bwd  o_i = t_i - exp(y_i) * sum_j t_j
// Layout   row-major [rows, n], every array aligned to 16 bytes. A row may start anywhere: it is walked by the aligned vectors
//          that it touches, of which the first and the last may be its own only in part; those go element by element.
// Work     select.h `row_shape`: 8 or 32 lanes of a warp for a row up to 1024 elements (pairs of operands 512), else a block, up
//          to 32768 (pairs 16384). The row stays in registers; one barrier for the maximum and one for the sum. A block has one row
//          and goes: many blocks on an SM hide the latency of memory. Longer rows: softmax_long.cu; half types' rows of whole
//          vectors: softmax_whole.cu.
// Cost     reads each operand once, writes once. Bound: memory; of half types, instructions.
// Measured on an H200, share of a copy (4.10 TB/s): float32 16384x4096 softmax 99 %, log_softmax 101 %, tangent 103 %; 65536x1024
//          98, 98, 105 %; 8192x8192 88, 90, 104 %. bf16 32768x4095 56, 56, 71 %; 134000x1001 71, 62, 76 %.
// Tried    clusters of 8 blocks for bf16 2500x50257: 29 % of a copy, where two reads get 58 %.
// Sums     float32, in an order fixed by shape and row. Half types take the hardware's exp2 and one reciprocal of s: relative
//          errors below 2^-16, far below theirs; float32 has expf, and a reciprocal whose error one FMA takes back.
#include "act/select.h"
#include "act/softmax_row.cuh"
#include "common/team.cuh"

namespace jaxprims {
namespace {

using namespace team;

// Launch bounds for a row by `group` lanes or a block, `elements` a thread.
constexpr int most_threads(int group, int elements) { return group > 0 ? 256 : elements <= 16 ? 512 : 1024; }
constexpr int least_blocks(int group, int elements) { return group > 0 ? (elements <= 16 ? 4 : 3) : elements <= 16 ? 2 : 1; }

// exp(x - m). Half types, where what comes of it is divided by a sum of such terms: one FMA and the hardware's exp2; what m's product
// is rounded by, cancels.
template <class T>
__device__ __forceinline__ float shifted_exp(float x, float m, float m_log2) {
  if constexpr (sizeof(T) == 4) return expf(x - m);
  else return exp2_of(fmaf(x, kLog2e, -m_log2));
}
template <class T, bool kLog, int kGroup, int K>
__global__ void __launch_bounds__(most_threads(kGroup, K * kV<T>), least_blocks(kGroup, K * kV<T>))
    softmax_vectors(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, bool accurate) {
  constexpr int V = kV<T>;
  __shared__ Scratch<float, kGroup> tops, sums[2];
  const Team<kGroup> team(1);
  const int group = team.size, lane = team.lane;
  int turn = 0;
  int64_t row = team.row;
  for (int64_t top = team.top; top < rows; top += team.step, row += team.step) {
    const bool live = row < rows;
    const Frame<T, int> f(row * n, live ? n : 0);
    const T* from = x + row * n;
    Pack<T, V> raw[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * group;
      if (live && at < f.vectors) {
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
      m = row_reduce<kGroup>(m, MaxNan{}, tops, 1);
    }
    // What is not the row's is -inf: its exp is 0, but NaN where m is -inf, and then the row is NaN by the formula anyway.
    float s = 0.f;
    const float m_log2 = m * kLog2e;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kLog) {
          value[k][v] -= m;
          s += exp_of<T>(value[k][v]);
        } else {
          value[k][v] = shifted_exp<T>(value[k][v], m, m_log2);
          s += value[k][v];
        }
      }
    s = row_sum<kGroup>(s, sums[turn], 1);
    turn ^= 1;
    if (!live) continue;
    const float log_s = kLog ? logf(s) : 0.f;
    const Divider<T> divided(s);
    T* to = y + row * n;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * group;
      if (at >= f.vectors) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if constexpr (kLog) value[k][v] -= log_s;
        else value[k][v] = divided(value[k][v]);
      }
      write(to, f, at, value[k]);
    }
  }
}

template <class T, PairOp kOp, int kGroup, int K>
__global__ void __launch_bounds__(kGroup > 0 ? 256 : K * kV<T> <= 8 ? 512 : 1024,
                                  kGroup > 0 ? 4 : K * kV<T> <= 8 ? 2 : 1)
    pair_vectors(const T* __restrict__ y, const T* __restrict__ t, T* __restrict__ out, int64_t rows, int n, Lead lead) {
  constexpr int V = kV<T>;
  __shared__ Scratch<float, kGroup> sums[2];
  const Team<kGroup> team(1);
  const int group = team.size, lane = team.lane;
  int turn = 0;
  int64_t row = team.row;
  for (int64_t top = team.top; top < rows; top += team.step, row += team.step) {
    const bool live = row < rows;
    const Frame<T, int> f(row * n, live ? n : 0);  // the launcher saw to it that rows of all three start alike
    const T* py = y + (live ? lead.at(0, row) * n : 0);
    const T* pt = t + (live ? lead.at(1, row) * n : 0);
    Pack<T, V> a[K], b[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * group;
      if (live && at < f.vectors) {
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
    sum = row_sum<kGroup>(sum, sums[turn], 1);
    turn ^= 1;
    if (!live) continue;
    T* to = out + row * n;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int at = lane + k * group;
      if (at >= f.vectors) continue;
      float value[V];
#pragma unroll
      for (int v = 0; v < V; ++v) value[v] = pair_finish<T, kOp>(to_float(a[k].v[v]), to_float(b[k].v[v]), sum);
      write(to, f, at, value);
    }
  }
}

// --- launchers --------------------------------------------------------------------------------------------------------------

bool aligned(std::initializer_list<const void*> arrays) {
  for (const void* p : arrays)
    if (reinterpret_cast<uintptr_t>(p) % 16) return false;
  return true;
}


// f(lanes, vectors) with the shape as compile-time numbers.
template <int V, bool kPair, class F>
void by_shape(const RowShape& s, F&& f) {
  using std::integral_constant;
  constexpr int k8 = 8 / V, k16 = 16 / V, k32 = 32 / V;
  const auto go = [&](auto group, auto vectors) { f(group, vectors); };
  integral_constant<int, kBlock> block;
  integral_constant<int, 8> eight;
  integral_constant<int, 32> warp;
  integral_constant<int, k8> few;
  integral_constant<int, k16> half;
  integral_constant<int, k32> many;
  if constexpr (kPair) {
    if (s.group == 8) s.vectors == k8 ? go(eight, few) : go(eight, half);
    else if (s.group == 32) s.vectors == k8 ? go(warp, few) : go(warp, half);
    else s.vectors == k8 ? go(block, few) : go(block, half);
  } else {
    if (s.group == 8) s.vectors == k8 ? go(eight, few) : s.vectors == k16 ? go(eight, half) : go(eight, many);
    else if (s.group == 32) s.vectors == k16 ? go(warp, half) : go(warp, many);
    else s.vectors == k16 ? go(block, half) : go(block, many);
  }
}

template <class T, bool kLog>
cudaError_t launch_forward(const T* x, T* y, int64_t rows, int64_t n, bool accurate, cudaStream_t stream) {
  const RowShape shape = row_shape(n, kV<T>, false);
  if (shape.threads == 0) return launch_softmax_long(x, y, rows, n, kLog, accurate, stream);
  cudaError_t e = cudaSuccess;
  by_shape<kV<T>, false>(shape, [&](auto group, auto vectors) {
    e = launch(softmax_vectors<T, kLog, decltype(group)::value, decltype(vectors)::value>,
               grid_of(ceil_div(rows, shape.rows())), shape.threads, 1, 0, stream, x, y, rows,
               static_cast<int>(n), accurate);
  });
  return e;
}

template <class T, PairOp kOp>
cudaError_t launch_pair(const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream) {
  const RowShape shape = row_shape(n, kV<T>, true);
  if (shape.threads == 0) return launch_softmax_pair_long(kOp, y, t, out, rows, n, lead, stream);
  cudaError_t e = cudaSuccess;
  by_shape<kV<T>, true>(shape, [&](auto group, auto vectors) {
    e = launch(pair_vectors<T, kOp, decltype(group)::value, decltype(vectors)::value>,
               grid_of(ceil_div(rows, shape.rows())), shape.threads, 1, 0, stream, y, t, out, rows,
               static_cast<int>(n), lead);
  });
  return e;
}

}  // namespace

template <class T>
bool launch_softmax_rows(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream, cudaError_t& e) {
  if (!aligned({x, y})) return false;
  if constexpr (sizeof(T) == 2)
    if (launch_softmax_whole(x, y, rows, n, log, accurate, stream, e)) return true;
  e = log ? launch_forward<T, true>(x, y, rows, n, accurate, stream) : launch_forward<T, false>(x, y, rows, n, accurate, stream);
  return true;
}

template <class T>
bool launch_softmax_pair_rows(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead, cudaStream_t stream,
                              cudaError_t& e) {
  if (!aligned({y, t, out}) || (lead.axes && n % kV<T>)) return false;
  if constexpr (sizeof(T) == 2)
    if (lead.axes == 0 && launch_pair_whole(op, y, t, out, rows, n, stream, e)) return true;
  switch (op) {
    case PairOp::kSoftmaxJvp: e = launch_pair<T, PairOp::kSoftmaxJvp>(y, t, out, rows, n, lead, stream); break;
    case PairOp::kLogSoftmaxJvp: e = launch_pair<T, PairOp::kLogSoftmaxJvp>(y, t, out, rows, n, lead, stream); break;
    case PairOp::kLogSoftmaxBwd: e = launch_pair<T, PairOp::kLogSoftmaxBwd>(y, t, out, rows, n, lead, stream); break;
  }
  return true;
}

#define JAXPRIMS_SOFTMAX_ROWS(T)                                                                          \
  template bool launch_softmax_rows<T>(const T*, T*, int64_t, int64_t, bool, bool, cudaStream_t, cudaError_t&); \
  template bool launch_softmax_pair_rows<T>(PairOp, const T*, const T*, T*, int64_t, int64_t, const Lead&, cudaStream_t, cudaError_t&);
JAXPRIMS_SOFTMAX_ROWS(float)
JAXPRIMS_SOFTMAX_ROWS(__half)
JAXPRIMS_SOFTMAX_ROWS(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX_ROWS

}  // namespace jaxprims
