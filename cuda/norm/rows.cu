// Norms whose statistics are rows of consecutive elements (layer norm and RMS norm over the last axes, instance and group norm
// NCHW), in 16-byte vectors.
//   forward   y = act((x - mean) rstd scale + bias + residual)
//   backward  dx = rstd (g - (sum g + xhat sum g xhat) / n) + ..., dresidual = h, dscale = sum h xhat, dbias = sum h (backward.cu)
//
// Layout   [rows, length] row-major; parameters one value per element, per so many elements, or per row (select.h, RowTerm).
// Work     forward: a group of threads (1-32 lanes of a warp, or a block) holds its row in registers, as the raw vectors: mean of
//          x - x[0], then squared deviations from that mean (two floats), then y: x is read once. Rows too long to hold: a block
//          gathers shifted moments and reads the row a second time, from L1 or L2.
//          backward: a persistent grid; x and dy of the next rows are on their way to shared memory while a row is worked on; each thread's columns stay the same, so that dscale and
//          dbias gather in registers over all rows of a block; one partial sum per block, added in a fixed order by rows_sums.
// Cost     forward: x once, y once. backward: x and dy once, dx once, and two floats per column and block. Bound: memory.
#include "norm/fast.cuh"

namespace jaxprims {
namespace norm {
namespace {

// Sum over the `group` neighbouring threads, the same bits in each; wide groups are whole blocks. One barrier: two calls in turn
// use two scratch buffers.
struct Sum2 {
  float a, b;
};
__device__ __forceinline__ float group_sum(float v, int group, float* scratch) {
  if (group <= 32) {
    for (int o = group >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
  }
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  if (lane == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = lane < (group >> 5) ? scratch[lane] : 0.f;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
__device__ __forceinline__ Sum2 group_sum(Sum2 v, int group, Sum2* scratch) {
  if (group <= 32) {
    for (int o = group >> 1; o > 0; o >>= 1)
      v.a += __shfl_xor_sync(0xffffffffu, v.a, o), v.b += __shfl_xor_sync(0xffffffffu, v.b, o);
    return v;
  }
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v.a += __shfl_xor_sync(0xffffffffu, v.a, o), v.b += __shfl_xor_sync(0xffffffffu, v.b, o);
  if (lane == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  v = lane < (group >> 5) ? scratch[lane] : Sum2{0.f, 0.f};
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v.a += __shfl_xor_sync(0xffffffffu, v.a, o), v.b += __shfl_xor_sync(0xffffffffu, v.b, o);
  return v;
}

// Bases of a row's parameters.
struct Bases {
  int64_t scale = 0, bias = 0;
};
__device__ __forceinline__ Bases bases(const Problem& p, const RowPlan& q, int64_t i) {
  Bases b;
  if (q.scale.kind) b.scale = p.a[kScale].runs.at(i, p.wide);
  if (q.bias.kind) b.bias = p.a[kBias].runs.at(i, p.wide);
  return b;
}

// z of a vector whose centred values are c.
template <class T>
__device__ __forceinline__ void pre(const Problem& p, const RowPlan& q, const Bases& b, int64_t i, int j, float rstd,
                                    const float (&c)[kVec<T>], float (&z)[kVec<T>]) {
  constexpr int V = kVec<T>;
  float w[V];
  row_values<T>(p.a[kScale], q.scale, b.scale, j, 1.f, w);
#pragma unroll
  for (int v = 0; v < V; ++v) z[v] = c[v] * rstd * w[v];
  if (q.bias.kind) {
    row_values<T>(p.a[kBias], q.bias, b.bias, j, 0.f, w);
#pragma unroll
    for (int v = 0; v < V; ++v) z[v] += w[v];
  }
  if (p.a[kResidual].here()) {
    unpack<T>(take_once(static_cast<const T*>(p.a[kResidual].data) + i + j), w);
#pragma unroll
    for (int v = 0; v < V; ++v) z[v] += w[v];
  }
}
template <class T>
__device__ __forceinline__ void write_forward(const Problem& p, const RowPlan& q, const Bases& b, int64_t i, int j, float rstd,
                                              const float (&c)[kVec<T>]) {
  float z[kVec<T>];
  pre<T>(p, q, b, i, j, rstd, c, z);
  activate(p.act, z);
  give(static_cast<T*>(p.a[kY].data) + i + j, z);
}

template <class T, int K>
__global__ void __launch_bounds__(K == 8 ? 512 : 256, K == 8 ? 1 : 3)
rows_forward_held(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q) {
  constexpr int V = kVec<T>;
  constexpr bool kAhead = K <= 2;  // the next row is on its way while this one is worked on
  __shared__ float scratch[2][32];
  const int group = q.group, lane = threadIdx.x % group, per = blockDim.x / group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * per;
  const T* const x = static_cast<const T*>(p.a[kX].data);
  int turn = 0;

  Held<T> held[K];
  float pivot;
  auto fetch = [&](int64_t row, Held<T>(&h)[K], float& first) {
    const bool live = row < q.rows;
    const int64_t i = row * q.length;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      h[k] = live && j < q.length ? take_once(x + i + j) : nothing<T>();
    }
    first = live && !p.rms ? to_float(x[i]) : 0.f;
  };

  int64_t row = static_cast<int64_t>(blockIdx.x) * per + threadIdx.x / group;
  if (kAhead) fetch(row, held, pivot);
  for (int64_t top = static_cast<int64_t>(blockIdx.x) * per; top < q.rows; top += step, row += step) {
    Held<T> next[kAhead ? K : 1];
    float next_pivot = 0.f;
    if constexpr (kAhead) fetch(row + step, next, next_pivot);
    else fetch(row, held, pivot);

    Value moments{static_cast<float>(q.length), pivot, 0.f, 0.f};
    if (!p.rms) {
      float s = 0.f;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if ((lane + k * group) * V >= q.length) continue;
        float v[V];
        unpack<T>(held[k], v);
#pragma unroll
        for (int e = 0; e < V; ++e) s += v[e] - pivot;
      }
      moments.a = group_sum(s, group, scratch[turn]) / moments.n;
      turn ^= 1;
    }
    float mean, low, var;
    moments_of(moments, p.rms, mean, low, var);
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if ((lane + k * group) * V >= q.length) continue;
      float v[V];
      unpack<T>(held[k], v);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float c = (v[e] - mean) - low;
        s += c * c;
      }
    }
    moments.b = group_sum(s, group, scratch[turn]);
    turn ^= 1;
    const float rstd = inverse_root(moments.b / moments.n, p.eps);

    if (row < q.rows) {
      const int64_t i = row * q.length;
      if (lane == 0) finish<T, Gather::kMoments>(p, moments, i, Gather::kMoments);
      const Bases b = bases(p, q, i);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = (lane + k * group) * V;
        if (j >= q.length) continue;
        float c[V];
        unpack<T>(held[k], c);
#pragma unroll
        for (int e = 0; e < V; ++e) c[e] = (c[e] - mean) - low;
        write_forward<T>(p, q, b, i, j, rstd, c);
      }
    }
    if constexpr (kAhead) {
#pragma unroll
      for (int k = 0; k < K; ++k) held[k] = next[k];
      pivot = next_pivot;
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
    const float rstd = inverse_root(var, p.eps);
    const Bases bs = bases(p, q, i);
#pragma unroll 2
    for (int j = start + (q.length - 1 - start) / kStep * kStep; j >= start; j -= kStep) {
      if (j >= q.length) continue;  // a thread without a vector
      float c[V];
      unpack<T>(take_once(x + j), c);
#pragma unroll
      for (int e = 0; e < V; ++e) c[e] = (c[e] - mean) - low;
      write_forward<T>(p, q, bs, i, j, rstd, c);
    }
  }
}

// --- backward -------------------------------------------------------------------------------------------------------------

// h = dy act'(z) in place of dy.
template <class T>
__device__ __forceinline__ void slope(const Problem& p, const RowPlan& q, const Bases& b, int64_t i, int j, float rstd,
                                      const float (&c)[kVec<T>], float (&h)[kVec<T>]) {
  if (p.act == Act::kNone) return;
  float z[kVec<T>];
  pre<T>(p, q, b, i, j, rstd, c, z);
  times_slope(p.act, z, h);
}

// Copies of 16 bytes to shared memory that a thread waits for and reads itself: no barrier.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool real) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kLeft) : "memory");
}
template <class T>
__device__ __forceinline__ Held<T> staged(const uint4* from) {
  const uint4 u = *from;
  Held<T> h;
  memcpy(&h, &u, 16);
  return h;
}

// The stages of x and dy in shared memory: [stage][x, dy][k][thread].
constexpr int stages(int k) { return k == 4 ? 2 : 3; }
constexpr int stage_bytes(int k, int block) { return stages(k) * 2 * k * block * 16; }

// kPlain: no activation.
template <class T, int K, bool kPlain>
__global__ void __launch_bounds__(K == 1 ? 256 : 512, K == 1 ? (kPlain ? 3 : 2) : 1)
rows_backward_held(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q, float* partial) {
  constexpr int V = kVec<T>, kStages = stages(K);
  extern __shared__ uint4 stage[];
  __shared__ Sum2 scratch[2][16];
  __shared__ float sums[K <= 2 ? V : 1][256];
  const int group = q.group, lane = threadIdx.x % group, mine = threadIdx.x / group, per = blockDim.x / group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * per;
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

  int64_t row = static_cast<int64_t>(blockIdx.x) * per + mine;
#pragma unroll
  for (int a = 0; a < kStages - 1; ++a) fetch(row + a * step, a);
  int at = 0;
  for (int64_t top = static_cast<int64_t>(blockIdx.x) * per; top < q.rows; top += step, row += step) {
    fetch(row + (kStages - 1) * step, at == 0 ? kStages - 1 : at - 1);
    const bool live = row < q.rows;
    const int64_t i = row * q.length;
    Stat s;
    Bases bs;
    if (live) s = stat_at<T>(p, i), bs = bases(p, q, i);
    copies_wait<kStages - 1>();
    Sum2 sum{0.f, 0.f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = (lane + k * group) * V;
      if (!live || j >= q.length) continue;
      float c[V], h[V], w[V];
      unpack<T>(staged<T>(place(at, 0, k)), c);
      unpack<T>(staged<T>(place(at, 1, k)), h);
#pragma unroll
      for (int e = 0; e < V; ++e) c[e] = (c[e] - s.mean) - s.low;
      if (!kPlain) slope<T>(p, q, bs, i, j, s.rstd, c, h);
      row_values<T>(p.a[kScale], q.scale, bs.scale, j, 1.f, w);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float xhat = c[e] * s.rstd, g = h[e] * w[e];
        dbias[k][e] += h[e];
        dscale[k][e] += h[e] * xhat;
        sum.a += g;
        sum.b += g * xhat;
      }
    }
    sum = group_sum(sum, group, scratch[turn]);
    turn ^= 1;
    if (live) {
      const bool more = p.a[kCvar].here();
      const float cmean = more && p.a[kCmean].here() ? get<T>(p.a[kCmean], i, p.wide) : 0.f;
      const float cvar = more ? get<T>(p.a[kCvar], i, p.wide) : 0.f;
      const float sa = p.rms ? 0.f : sum.a;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = (lane + k * group) * V;
        if (j >= q.length) continue;
        float c[V], h[V], w[V];
        unpack<T>(staged<T>(place(at, 0, k)), c);
        unpack<T>(staged<T>(place(at, 1, k)), h);
#pragma unroll
        for (int e = 0; e < V; ++e) c[e] = (c[e] - s.mean) - s.low;
        if (!kPlain) slope<T>(p, q, bs, i, j, s.rstd, c, h);
        if (p.a[kDresidual].here()) give(static_cast<T*>(p.a[kDresidual].data) + i + j, h);
        row_values<T>(p.a[kScale], q.scale, bs.scale, j, 1.f, w);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const float back = s.rstd * (sa + c[e] * s.rstd * sum.b) - (cmean + 2.f * c[e] * cvar);
          h[e] = s.rstd * h[e] * w[e] - back * inv_n;
        }
        give(static_cast<T*>(p.a[kDx].data) + i + j, h);
      }
    }
    at = at + 1 == kStages ? 0 : at + 1;
  }
  copies_wait<0>();
  if (partial == nullptr) return;

  float* const out = partial + static_cast<int64_t>(blockIdx.x) * 2 * q.length;
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float(&a)[V] = which == 0 ? dscale[k] : dbias[k];
      if (K > 2 || per == 1) {
        const int j = (lane + k * group) * V;
        if (j >= q.length) continue;
        float4* const to = reinterpret_cast<float4*>(out + static_cast<int64_t>(which) * q.length + j);
#pragma unroll
        for (int e = 0; e < V / 4; ++e) to[e] = {a[4 * e], a[4 * e + 1], a[4 * e + 2], a[4 * e + 3]};
      } else {  // 256 threads, groups of at most 32: one thread per column adds the groups in turn
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; ++e) sums[e][threadIdx.x] = a[e];
        __syncthreads();
        if (threadIdx.x < group * V) {
          const int at = threadIdx.x % group, e = threadIdx.x / group, j = (at + k * group) * V + e;
          float s = 0.f;
          for (int m = 0; m < per; ++m) s += sums[e][m * group + at];
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

cudaError_t rows_forward(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const unsigned grid = static_cast<unsigned>(q.blocks);
    switch (q.k) {
      case 0: rows_forward_long<T><<<grid, q.block, 0, stream>>>(p, q); break;
      case 1: rows_forward_held<T, 1><<<grid, q.block, 0, stream>>>(p, q); break;
      case 2: rows_forward_held<T, 2><<<grid, q.block, 0, stream>>>(p, q); break;
      case 4: rows_forward_held<T, 4><<<grid, q.block, 0, stream>>>(p, q); break;
      default: rows_forward_held<T, 8><<<grid, q.block, 0, stream>>>(p, q); break;
    }
    return cudaGetLastError();
  });
}

cudaError_t rows_backward(ffi::DataType dtype, const Problem& p, const RowPlan& q, float* partial, bool sums, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    float* const to = sums ? partial : nullptr;
    auto go = [&](auto kernel) {
      const int bytes = stage_bytes(q.k, q.block);
      if (bytes > 32 * 1024) {  // beside what is static
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (e != cudaSuccess) return e;
      }
      kernel<<<static_cast<unsigned>(q.blocks), q.block, bytes, stream>>>(p, q, to);
      return cudaGetLastError();
    };
    const bool plain = p.act == Act::kNone;
    const cudaError_t e = q.k == 1   ? plain ? go(rows_backward_held<T, 1, true>) : go(rows_backward_held<T, 1, false>)
                          : q.k == 2 ? plain ? go(rows_backward_held<T, 2, true>) : go(rows_backward_held<T, 2, false>)
                          : plain    ? go(rows_backward_held<T, 4, true>)
                                     : cudaErrorInvalidConfiguration;
    if (e != cudaSuccess || !sums) return e;
    rows_sums<T><<<static_cast<unsigned>(ceil_div(q.length, 32)), 1024, 0, stream>>>(p, partial, q.blocks, q.length);
    return cudaGetLastError();
  });
}

}  // namespace norm
}  // namespace jaxprims
