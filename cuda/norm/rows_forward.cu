// Forward norms whose statistics are rows of consecutive elements (layer norm and RMS norm over the last axes, instance and group
// norm NCHW), in 16-byte vectors.
//   y = act((x - mean) rstd scale + bias + residual)
//
// Layout   [rows, length] row-major; parameters one value per element, per so many elements, or per row (select.h, RowTerm).
// Work     8 or 32 lanes of a warp, or a block, hold a row in registers: its mean (about x[0], so that constants are exact), then
//          the squared deviations from that mean, then y: x is read once. The mean is kept in two floats; its low word corrects
//          the variance (sum d^2 / n - low^2) and each normalised value. One barrier a sum. Blocks take their rows as they come:
//          what hides the latency of memory is the number of blocks on an SM.
//          Rows too long to hold: a block gathers shifted moments and reads the row a second time, from L1 or L2.
// Cost     x once, y once. Bound: memory.
#include "norm/rows.cuh"

namespace jaxprims {
namespace norm {
namespace {

constexpr int most_threads(int group) { return group > 0 ? 256 : group == kBlock ? 1024 : 512; }
constexpr int least_blocks(int group, int elements, bool plain) {
  return group > 0 ? (!plain ? 2 : elements <= 16 ? 4 : 3) : group == kBlock ? 1 : plain ? 2 : 1;
}

// kGroup: lanes of a row, kBlock or kCluster. K vectors a thread.
template <class T, int kGroup, int K, bool kPlain>
__global__ void __launch_bounds__(most_threads(kGroup), least_blocks(kGroup, K * kVec<T>, kPlain))
rows_forward_held(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kGroup == kCluster) return;
#endif
  constexpr int V = kVec<T>;
  __shared__ Scratch<float, kGroup> scratch[2];
  const Team<kGroup> team(q.cluster);
  const int group = team.size, lane = team.lane;
  const T* const x = static_cast<const T*>(p.a[kX].data);
  T* const y = static_cast<T*>(p.a[kY].data);
  const float inv_n = 1.f / static_cast<float>(q.length);
  int turn = 0;

  if constexpr (kGroup == kCluster) cluster_sync();  // all are there
  int64_t row = team.row;
  for (int64_t top = team.top; top < q.rows; top += team.step, row += team.step) {
    const bool live = row < q.rows;
    const int64_t i = row * q.length;
    float d[K][V];
    {
      Held<T> held[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = (lane + k * group) * V;
        held[k] = live && j < q.length ? take_once(x + i + j) : nothing<T>();
      }
#pragma unroll
      for (int k = 0; k < K; ++k) unpack<T>(held[k], d[k]);
    }
    float mean = 0.f, low = 0.f;
    if (!p.rms) {
      const float pivot = live ? to_float(x[i]) : 0.f;
      float s = 0.f;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if ((lane + k * group) * V >= q.length) continue;
#pragma unroll
        for (int e = 0; e < V; ++e) s += d[k][e] - pivot;
      }
      const float a = row_sum<kGroup>(s, scratch[turn], q.cluster) * inv_n;
      turn ^= 1;
      float var;
      moments_of({1.f, pivot, a, 0.f}, false, mean, low, var);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int e = 0; e < V; ++e) d[k][e] -= mean;
    }
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if ((lane + k * group) * V >= q.length) continue;
#pragma unroll
      for (int e = 0; e < V; ++e) s = fmaf(d[k][e], d[k][e], s);
    }
    float var = fmaf(-low, low, row_sum<kGroup>(s, scratch[turn], q.cluster) * inv_n);
    var = var < 0.f ? 0.f : var;  // NaN stays
    turn ^= 1;
    const float rstd = quick_inverse_root(var, p.eps), less = -low * rstd;
    if (!live) continue;
    if (lane == 0) {
      put_row<T>(p, q, p.a[kMean], row, mean);
      put_row<T>(p, q, p.a[kLow], row, low);
      put_row<T>(p, q, p.a[kVar], row, var);
      put_row<T>(p, q, p.a[kCount], row, static_cast<float>(q.length));
    }
    const Bases b = bases(p, q, row);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      if (j >= q.length) continue;
#pragma unroll
      for (int e = 0; e < V; ++e) d[k][e] = fmaf(d[k][e], rstd, less);
      pre<T, kPlain>(p, q, b, i, j, d[k]);
      if constexpr (!kPlain) activate(p.act, d[k]);
      give(y + i + j, d[k]);
    }
  }
}

// A block of 512 threads per row, read twice.
template <class T>
__global__ void __launch_bounds__(512, 2) rows_forward_long(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q) {
  constexpr int V = kVec<T>, kStep = 512 * V;
  __shared__ Value slot[512];
  for (int64_t row = blockIdx.x; row < q.rows; row += gridDim.x) {
    const int64_t i = row * q.length;
    const T* const x = static_cast<const T*>(p.a[kX].data) + i;
    const int start = threadIdx.x * V;
    float n = 0.f, pivot = 0.f, a = 0.f, b = 0.f;
#pragma unroll 4
    for (int j = start; j < q.length; j += kStep) {
      float v[V];
      unpack<T>(take_vector(x + j), v);
      if (j == start && !p.rms) {  // the first vector's mean, exact for a constant
        float s = 0.f;
#pragma unroll
        for (int e = 1; e < V; ++e) s += v[e] - v[0];
        pivot = v[0] + s * (1.f / V);
      }
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float d = v[e] - pivot;
        a += d, b += d * d;
      }
      n += V;
    }
    Value u{n, pivot, 0.f, b};
    if (n > 0.f && !p.rms) u.a = a / n, u.b = b - a * u.a;
    slot[threadIdx.x] = u;
#pragma unroll
    for (int half = 256; half > 0; half >>= 1) {
      __syncthreads();
      if (threadIdx.x < half) slot[threadIdx.x] = joined<Gather::kMoments>(slot[threadIdx.x], slot[threadIdx.x + half], p.rms);
    }
    __syncthreads();
    Value all = slot[0];
    all.b = all.b < 0.f ? 0.f : all.b;  // NaN stays
    __syncthreads();
    if (threadIdx.x == 0) finish<T, Gather::kMoments>(p, all, i, Gather::kMoments);
    float mean, low, var;
    moments_of(all, p.rms, mean, low, var);
    const float rstd = inverse_root(var, p.eps), less = -low * rstd;
    const Bases bs = bases(p, q, row);
#pragma unroll 2
    for (int j = start + (q.length - 1 - start) / kStep * kStep; j >= start; j -= kStep) {
      if (j >= q.length) continue;  // a thread without a vector
      float c[V];
      unpack<T>(take_once(x + j), c);
#pragma unroll
      for (int e = 0; e < V; ++e) c[e] = fmaf(c[e] - mean, rstd, less);
      pre<T, false>(p, q, bs, i, j, c);
      activate(p.act, c);
      give(static_cast<T*>(p.a[kY].data) + i + j, c);
    }
  }
}

}  // namespace

cudaError_t rows_forward(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    auto go = [&](auto plain, auto other) { return launch_rows(q.plain ? plain : other, q, 0, stream, p, q); };
#define ROWS(group, k) go(rows_forward_held<T, group, k, true>, rows_forward_held<T, group, k, false>)
    constexpr int k8 = 8 / kVec<T>, k16 = 16 / kVec<T>, k32 = 32 / kVec<T>;  // vectors of as many elements
    if (q.k == 0) return launch_rows(rows_forward_long<T>, q, 0, stream, p, q);
    if (q.group == 8) return q.k == k8 ? ROWS(8, k8) : q.k == k16 ? ROWS(8, k16) : ROWS(8, k32);
    if (q.group == 32) return q.k == k16 ? ROWS(32, k16) : ROWS(32, k32);
    return q.cluster > 1 ? ROWS(kCluster, k16) : ROWS(kBlock, k16);
#undef ROWS
  });
}

}  // namespace norm
}  // namespace jaxprims
