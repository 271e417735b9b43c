// Layer norm and RMS norm forward in their common form, rows_forward.cu's without activation and residual: y = xhat scale + bias.
//
// Layout   [rows, length] row-major, length a multiple of a 16-byte vector; scale and bias one value per element or absent;
//          statistics float32, one a row.
// Work     4, 8 or 32 lanes of a warp, a block of up to 512 threads, or a cluster of blocks have one row and go. Up to 32
//          elements of it lie in a thread's registers. Mean, then squared deviations from it, then y: one barrier a sum.
//          The mean is two floats. Half types: the sum of x 2^-16 is exact where all x are equal, and does not overflow;
//          float32: the sum of x - x[0].
// Cost     x once, y once. Bound: memory; of half types, instructions come close: hence a kernel without options.
// Measured on an H200, share of a copy (4.10 TB/s), LN and RMS: bf16 32768x4096 96, 99 %; 131072x1024 97, 98 %; 1048576x128 81, 90 %;
//          26000x5120 92, 101 %; 16384x8192 94, 99 %; 10000x12288 81, 92 %; 8192x16384 87, 97 %; 4096x32768 62, 76 %;
//          float32 93-99 %. Before, of rows_forward.cu's kernel: bf16 32768x4096 62, 74 %.
// Tried    H200, bf16, 32768 x 4096, share of a copy: 256 threads with 16 elements each 92 % at 5 blocks an SM and 98 % at 6;
//          128 threads with 32 elements 99 %; a persistent grid 86 %, with two rows ahead in shared memory (cp.async) 84 %.
#include "norm/rows.cuh"

namespace jaxprims {
namespace norm {
namespace {

struct Plain {
  const void *x, *scale, *bias;
  void* y;
  float *mean, *low, *var, *count;
  int64_t rows;
  int length, cluster;
  float eps;
  bool scale_float, bias_float;  // float32, where x is not
};

template <class T>
__device__ __forceinline__ void parameter(const void* a, bool wide, int j, float otherwise, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  if (a == nullptr) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = otherwise;
  } else if (sizeof(T) == 4 || !wide) {
    unpack<T>(take_vector(static_cast<const T*>(a) + j), v);
  } else {
    const float4* const f = reinterpret_cast<const float4*>(static_cast<const float*>(a) + j);
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      const float4 w = f[i];
      v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
    }
  }
}

constexpr int plain_threads(int group) { return group > 0 ? 256 : 512; }

template <class T, int kGroup, int K, bool kRms>
__global__ void __launch_bounds__(plain_threads(kGroup), kGroup > 0 ? 4 : 2) rows_forward_plain(const Plain a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kGroup == kCluster) return;
#endif
  constexpr int V = kVec<T>;
  constexpr float kSmall = sizeof(T) == 4 ? 1.f : 0x1p-16f;
  __shared__ Scratch<float, kGroup> scratch[2];
  const Team<kGroup> team(a.cluster);
  const int group = team.size, lane = team.lane, n = a.length;
  if constexpr (kGroup == kCluster) cluster_sync();  // all are there
  const bool live = kGroup <= 0 || team.row < a.rows;
  const int64_t row = live ? team.row : a.rows - 1, first = row * n;
  const T* const x = static_cast<const T*>(a.x) + first;
  const float pivot = kRms || sizeof(T) == 2 ? 0.f : to_float(x[0]);
  float d[K][V];
  {
    Held<T> held[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      held[k] = j < n ? take_once(x + j) : nothing<T>();
    }
#pragma unroll
    for (int k = 0; k < K; ++k) unpack<T>(held[k], d[k]);
  }
  const float inv_n = 1.f / static_cast<float>(n);
  float mean = 0.f, low = 0.f;
  if constexpr (!kRms) {
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (sizeof(T) == 4 && (lane + k * group) * V >= n) continue;
#pragma unroll
      for (int e = 0; e < V; ++e) s = sizeof(T) == 4 ? s + (d[k][e] - pivot) : fmaf(d[k][e], kSmall, s);
    }
    s = row_sum<kGroup>(s, scratch[0], a.cluster);
    if constexpr (sizeof(T) == 4) {
      float var;
      moments_of({1.f, pivot, s * inv_n, 0.f}, false, mean, low, var);
    } else {
      const float small = s / static_cast<float>(n);
      mean = small * (1.f / kSmall);
      low = fmaf(-small, static_cast<float>(n), s) * (1.f / kSmall) * inv_n;
      if (!(fabsf(low) < INFINITY)) low = 0.f;
    }
  }
  float s = 0.f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!kRms && (lane + k * group) * V >= n) continue;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if (!kRms) d[k][e] -= mean;
      s = fmaf(d[k][e], d[k][e], s);
    }
  }
  float var = row_sum<kGroup>(s, scratch[1], a.cluster) * inv_n;
  if constexpr (!kRms) var = fmaf(-low, low, var), var = var < 0.f ? 0.f : var;  // NaN stays
  const float rstd = quick_inverse_root(var, a.eps), less = -low * rstd;
  if (lane == 0 && live) {
    if (a.mean != nullptr) a.mean[row] = mean;
    if (a.low != nullptr) a.low[row] = low;
    a.var[row] = var;
    if (a.count != nullptr) a.count[row] = static_cast<float>(n);
  }
  T* const y = static_cast<T*>(a.y) + first;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int j = (lane + k * group) * V;
    if (j >= n || !live) continue;
    float w[V];
    parameter<T>(a.scale, a.scale_float, j, 1.f, w);
#pragma unroll
    for (int e = 0; e < V; ++e) d[k][e] = (kRms ? d[k][e] * rstd : fmaf(d[k][e], rstd, less)) * w[e];
    if (a.bias != nullptr) {
      parameter<T>(a.bias, a.bias_float, j, 0.f, w);
#pragma unroll
      for (int e = 0; e < V; ++e) d[k][e] += w[e];
    }
    give(y + j, d[k]);
  }
}

}  // namespace

cudaError_t rows_plain(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream) {
  const auto at = [&](Name n) { return static_cast<float*>(p.a[n].data); };
  const auto wide = [&](Name n) { return p.a[n].type == Type::kFloat; };
  const Plain a{p.a[kX].data, p.a[kScale].data, p.a[kBias].data, p.a[kY].data, at(kMean), at(kLow), at(kVar), at(kCount),
                q.rows,       q.length,         q.cluster,       p.eps,        wide(kScale), wide(kBias)};
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    auto go = [&](auto rms, auto mean) { return launch_rows(p.rms ? rms : mean, q, 0, stream, a); };
#define ROWS(group, k) go(rows_forward_plain<T, group, k, true>, rows_forward_plain<T, group, k, false>)
    constexpr int k16 = 16 / kVec<T>, k32 = 32 / kVec<T>;  // vectors of as many elements
    if (q.group == 4) return ROWS(4, k16);
    if (q.group == 8) return q.k == k16 ? ROWS(8, k16) : ROWS(8, k32);
    if (q.group == 32) return q.k == k16 ? ROWS(32, k16) : ROWS(32, k32);
    return q.cluster > 1 ? ROWS(kCluster, k32) : ROWS(kBlock, k32);
#undef ROWS
  });
}

}  // namespace norm
}  // namespace jaxprims
