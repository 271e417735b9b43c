// softmax, log_softmax and their tangents of half types over contiguous rows of whole 16-byte vectors: softmax_row.cu's formulas and accuracy,
// without its care for rows that start anywhere.
//
// Work     4, 8 or 32 lanes of a warp, a block of up to 512 threads, or a cluster of 2 or 4 blocks have one row and go; up to 32
//          elements (16 of two operands) lie in a thread's registers. One barrier for the maximum and one for the sum.
// Cost     reads each operand once, writes once. Bound: memory; of half types, instructions come close.
// Measured on an H200, bf16, share of a copy (4.10 TB/s), softmax, log_softmax, tangent: 32768x4096 86, 82, 105 %; 131072x1024
//          82, 83, 105 %; 1048576x128 91, 91, 104 %; 16384x8192 72, 72, 106 %; 8192x16384 64, 63, 88 %; 4096x32768 57, 56, 81 %.
// Tried    the same without care for NaN, other lengths and pairs of conversions, 32768x4096: 256 threads with 16 elements each
//          and 128 with 32 99 %; 512 with 8 75 %; a persistent grid with two rows ahead in shared memory 86 %. softmax_row.cu's
//          kernel 70 %.
#include "act/select.h"
#include "act/softmax_row.cuh"
#include "common/team.cuh"

namespace jaxprims {
namespace {

using namespace team;

template <class T>
__device__ __forceinline__ void take(const T* from, bool here, float other, float (&v)[kV<T>]) {
  Pack<T, kV<T>> p;
  if (here) {
    const uint4 u = __ldcs(reinterpret_cast<const uint4*>(from));
    memcpy(&p, &u, 16);
  }
#pragma unroll
  for (int i = 0; i < kV<T>; ++i) v[i] = here ? to_float(p.v[i]) : other;
}
template <class T>
__device__ __forceinline__ void give(T* to, const float (&v)[kV<T>]) {
  Pack<T, kV<T>> p;
#pragma unroll
  for (int i = 0; i < kV<T>; ++i) p.v[i] = from_float<T>(v[i]);
  uint4 u;
  memcpy(&u, &p, 16);
  __stcs(reinterpret_cast<uint4*>(to), u);
}

constexpr int whole_threads(int group) { return group > 0 ? 256 : 512; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kNoClusters = true;
#else
constexpr bool kNoClusters = false;
#endif

template <class T, bool kLog, int kGroup, int K>
__global__ void __launch_bounds__(whole_threads(kGroup), kGroup > 0 ? 4 : 2)
    softmax_whole(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, bool accurate, int cluster) {
  if constexpr (kGroup == kCluster && kNoClusters) return;
  constexpr int V = kV<T>;
  __shared__ Scratch<float, kGroup> scratch[2];
  const Team<kGroup> team(cluster);
  const int group = team.size, lane = team.lane;
  if constexpr (kGroup == kCluster) cluster_sync();  // all are there
  const bool live = kGroup <= 0 || team.row < rows;
  const int64_t first = (live ? team.row : rows - 1) * n;
  float value[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int j = (lane + k * group) * V;
    take(x + first + j, j < n, -kInf, value[k]);
  }
  float m = 0.f;
  if (accurate) {
    m = value[0][0];
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) m = max_nan(m, value[k][v]);
    m = row_reduce<kGroup>(m, MaxNan{}, scratch[0], cluster);
  }
  // What lies behind the row is -inf: its exp is 0, but NaN where m is -inf, and then the row is NaN by the formula anyway.
  float s = 0.f;
  const float m_log2 = m * kLog2e;
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (kLog) {
        value[k][v] -= m;
        s += exp_of<T>(value[k][v]);
      } else {  // what m_log2 is rounded by, cancels
        value[k][v] = exp2_of(fmaf(value[k][v], kLog2e, -m_log2));
        s += value[k][v];
      }
    }
  s = row_sum<kGroup>(s, scratch[1], cluster);
  const float log_s = kLog ? logf(s) : 0.f;
  const Divider<T> divided(s);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int j = (lane + k * group) * V;
    if (j >= n || !live) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) value[k][v] = kLog ? value[k][v] - log_s : divided(value[k][v]);
    give(y + first + j, value[k]);
  }
}

template <class T, PairOp kOp, int kGroup, int K>
__global__ void __launch_bounds__(whole_threads(kGroup), kGroup > 0 ? 4 : 2)
    pair_whole(const T* __restrict__ y, const T* __restrict__ t, T* __restrict__ out, int64_t rows, int n, int cluster) {
  if constexpr (kGroup == kCluster && kNoClusters) return;
  constexpr int V = kV<T>;
  __shared__ Scratch<float, kGroup> scratch;
  const Team<kGroup> team(cluster);
  const int group = team.size, lane = team.lane;
  if constexpr (kGroup == kCluster) cluster_sync();  // all are there
  const bool live = kGroup <= 0 || team.row < rows;
  const int64_t first = (live ? team.row : rows - 1) * n;
  uint4 ys[K], ts[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int j = (lane + k * group) * V;
    ys[k] = ts[k] = {0, 0, 0, 0};
    if (j < n) ys[k] = __ldcs(reinterpret_cast<const uint4*>(y + first + j)), ts[k] = __ldcs(reinterpret_cast<const uint4*>(t + first + j));
  }
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pack<T, V> a, b;
    memcpy(&a, &ys[k], 16);
    memcpy(&b, &ts[k], 16);
#pragma unroll
    for (int v = 0; v < V; ++v) sum += pair_term<T, kOp>(to_float(a.v[v]), to_float(b.v[v]));
  }
  sum = row_sum<kGroup>(sum, scratch, cluster);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int j = (lane + k * group) * V;
    if (j >= n || !live) continue;
    Pack<T, V> a, b;
    memcpy(&a, &ys[k], 16);
    memcpy(&b, &ts[k], 16);
    float value[V];
#pragma unroll
    for (int v = 0; v < V; ++v) value[v] = pair_finish<T, kOp>(to_float(a.v[v]), to_float(b.v[v]), sum);
    give(out + first + j, value);
  }
}

// f(lanes, vectors) with the shape as compile-time numbers.
template <int V, bool kPair, class F>
cudaError_t by_shape(const RowShape& s, F&& f) {
  std::integral_constant<int, 16 / V> half;
  std::integral_constant<int, 32 / V> many;
  std::integral_constant<int, 8> eight;
  std::integral_constant<int, 32> warp;
  std::integral_constant<int, kBlock> block;
  std::integral_constant<int, kCluster> cluster;
  if (s.group == 4) return f(std::integral_constant<int, 4>{}, half);
  if constexpr (kPair) {
    return s.group == 8 ? f(eight, half) : s.group == 32 ? f(warp, half) : s.cluster > 1 ? f(cluster, half) : f(block, half);
  } else {
    if (s.group == 8) return s.vectors == half ? f(eight, half) : f(eight, many);
    if (s.group == 32) return s.vectors == half ? f(warp, half) : f(warp, many);
    return s.cluster > 1 ? f(cluster, many) : f(block, many);
  }
}

}  // namespace

template <class T>
bool launch_softmax_whole(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream, cudaError_t& e) {
  const RowShape s = whole_shape(n, kV<T>, false, clusters_usable());
  const int64_t blocks = s.threads ? ceil_div(rows, s.rows()) * s.cluster : 0;
  if (s.threads == 0 || blocks >= int64_t{1} << 31) return false;
  e = by_shape<kV<T>, false>(s, [&](auto group, auto vectors) {
    constexpr int kGroup = decltype(group)::value, K = decltype(vectors)::value;
    return launch(log ? softmax_whole<T, true, kGroup, K> : softmax_whole<T, false, kGroup, K>, blocks, s.threads, s.cluster, 0, stream, x,
                  y, rows, static_cast<int>(n), accurate, s.cluster);
  });
  return true;
}

template <class T>
bool launch_pair_whole(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, cudaStream_t stream, cudaError_t& e) {
  const RowShape s = whole_shape(n, kV<T>, true, clusters_usable());
  const int64_t blocks = s.threads ? ceil_div(rows, s.rows()) * s.cluster : 0;
  if (s.threads == 0 || blocks >= int64_t{1} << 31) return false;
  e = by_shape<kV<T>, true>(s, [&](auto group, auto vectors) {
    constexpr int kGroup = decltype(group)::value, K = decltype(vectors)::value;
    const auto kernel = op == PairOp::kSoftmaxJvp      ? pair_whole<T, PairOp::kSoftmaxJvp, kGroup, K>
                        : op == PairOp::kLogSoftmaxJvp ? pair_whole<T, PairOp::kLogSoftmaxJvp, kGroup, K>
                                                       : pair_whole<T, PairOp::kLogSoftmaxBwd, kGroup, K>;
    return launch(kernel, blocks, s.threads, s.cluster, 0, stream, y, t, out, rows, static_cast<int>(n), s.cluster);
  });
  return true;
}

#define JAXPRIMS_SOFTMAX_WHOLE(T)                                                                          \
  template bool launch_softmax_whole<T>(const T*, T*, int64_t, int64_t, bool, bool, cudaStream_t, cudaError_t&); \
  template bool launch_pair_whole<T>(PairOp, const T*, const T*, T*, int64_t, int64_t, cudaStream_t, cudaError_t&);
JAXPRIMS_SOFTMAX_WHOLE(__half)
JAXPRIMS_SOFTMAX_WHOLE(__nv_bfloat16)
#undef JAXPRIMS_SOFTMAX_WHOLE

}  // namespace jaxprims
