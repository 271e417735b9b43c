// Norms of rows whose length is no multiple of a 16-byte vector: rows_plain.cu's and rows_backward.cu's formulas and numbers.
//
// Layout   [rows, length] row-major, arrays at multiples of 16 bytes, rows anywhere.
// Work     as there, on the aligned vectors over a row: the first and the last are its own in part, and these go element by
//          element. Forward, a vector of scale or bias comes from the two aligned ones over it, shifted. Backward, the rows of a
//          block are as many elements apart as keep the shift: its threads' columns stay the same, and with them their sums and
//          their part of the scale, which lies in shared memory.
// Cost     x once, y once; x and dy once, dx once, two floats per column and block. Bound: memory, then instructions.
// Measured on an H200, bf16, share of a copy (4.10 TB/s), LN forward and backward: 32768x4097 43, 62 %; 30011x3001 49, 73 %;
//          134000x1001 51, 66 %; 17000x7777 45, 60 %.
// Tried    H200, bf16, share of a copy: rows in shared memory, single elements from there (each thread the same columns of
//          aligned rows) 28-30 % forward, 33-42 % backward.
#include "common/async_copy.cuh"
#include "norm/rows.cuh"

namespace jaxprims {
namespace norm {
namespace {

// Vector k of a row: its elements begin .. begin + V - 1 of which from <= e < to are the row's.
template <class T>
struct Part {
  int begin, from, to;
  __device__ __forceinline__ Part(int k, int shift, int n) : begin(k * kVec<T> - shift) {
    from = begin < 0 ? -begin : 0;
    to = n - begin < kVec<T> ? n - begin : kVec<T>;
  }
  __device__ __forceinline__ bool any() const { return to > 0; }
  __device__ __forceinline__ bool whole() const { return from == 0 && to == kVec<T>; }
};

template <class T>
__device__ __forceinline__ void give_part(T* row, const Part<T>& p, const float (&v)[kVec<T>]) {
  if (p.whole()) {
    give(row + p.begin, v);
  } else {
#pragma unroll
    for (int e = 0; e < kVec<T>; ++e)
      if (e >= p.from && e < p.to) row[p.begin + e] = from_float<T>(v[e]);
  }
}

// Elements begin .. begin + V - 1 of an array of n that starts at a multiple of 16 bytes; what lies outside is any number.
template <class T>
__device__ __forceinline__ void shifted_vector(const T* a, int k, int shift, int n, float (&v)[kVec<T>]) {
  constexpr int V = kVec<T>;
  uint4 lo{0, 0, 0, 0}, hi{0, 0, 0, 0};
  if (k > 0 && shift > 0 && (k - 1) * V < n) lo = *reinterpret_cast<const uint4*>(a + (k - 1) * V);
  if (k * V < n) hi = *reinterpret_cast<const uint4*>(a + k * V);
  uint32_t w[9] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w, 0};
  const int bytes = (V - shift) * static_cast<int>(sizeof(T));  // 2 to 16
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = bytes & 16 ? w[i + 4] : w[i];
#pragma unroll
  for (int i = 0; i < 7; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) == 2) {
    const int bits = (bytes & 2) * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bits);
  }
  Held<T> h;
  memcpy(&h, w, 16);
  unpack<T>(h, v);
}
template <class T>
__device__ __forceinline__ void parameter(const Array& a, int k, int shift, int n, float otherwise, float (&v)[kVec<T>]) {
  if (!a.here()) {
#pragma unroll
    for (int e = 0; e < kVec<T>; ++e) v[e] = otherwise;
  } else if (sizeof(T) == 4 || a.type == Type::kSame) {
    shifted_vector(static_cast<const T*>(a.data), k, shift, n, v);
  } else {
    const int begin = k * kVec<T> - shift;
#pragma unroll
    for (int e = 0; e < kVec<T>; ++e) v[e] = begin + e >= 0 && begin + e < n ? static_cast<const float*>(a.data)[begin + e] : 0.f;
  }
}

template <class T, int kGroup, int K, bool kRms>
__global__ void __launch_bounds__(kGroup > 0 ? 256 : 512, kGroup > 0 ? 3 : 1)
rows_forward_odd(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q) {
  constexpr int V = kVec<T>;
  __shared__ Scratch<float, kGroup> scratch[2];
  const Team<kGroup> team(1);
  const int group = team.size, lane = team.lane, n = q.length;
  const bool live = kGroup <= 0 || team.row < q.rows;
  const int64_t row = live ? team.row : q.rows - 1, first = row * n;
  const int shift = static_cast<int>(first % V);
  const T* const x = static_cast<const T*>(p.a[kX].data) + first;
  const float pivot = kRms ? 0.f : to_float(x[0]);
  float d[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Part<T> part(lane + k * group, shift, n);
    Held<T> h = nothing<T>();
    if (part.whole()) {
      h = take_once(x + part.begin);
    } else if (part.any()) {
#pragma unroll
      for (int e = 0; e < V; ++e)
        if (e >= part.from && e < part.to) h.v[e] = x[part.begin + e];
    }
    unpack<T>(h, d[k]);
  }
  const float inv_n = 1.f / static_cast<float>(n);
  // The sum over the row's own elements of f(d).
  const auto sum = [&](auto&& f) {
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Part<T> part(lane + k * group, shift, n);
      if (part.whole()) {
#pragma unroll
        for (int e = 0; e < V; ++e) s += f(d[k][e]);
      } else {
#pragma unroll
        for (int e = 0; e < V; ++e)
          if (e >= part.from && e < part.to) s += f(d[k][e]);
      }
    }
    return s;
  };
  float mean = 0.f, low = 0.f;
  if constexpr (!kRms) {
    float var;
    const float s = row_sum<kGroup>(sum([&](float v) { return v - pivot; }), scratch[0], 1);
    moments_of({1.f, pivot, s * inv_n, 0.f}, false, mean, low, var);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) d[k][e] -= mean;
  }
  float var = row_sum<kGroup>(sum([](float v) { return v * v; }), scratch[1], 1) * inv_n;
  if constexpr (!kRms) var = fmaf(-low, low, var), var = var < 0.f ? 0.f : var;  // NaN stays
  const float rstd = quick_inverse_root(var, p.eps), less = -low * rstd;
  if (lane == 0 && live) {
    put_row<T>(p, q, p.a[kMean], row, mean);
    put_row<T>(p, q, p.a[kLow], row, low);
    put_row<T>(p, q, p.a[kVar], row, var);
    put_row<T>(p, q, p.a[kCount], row, static_cast<float>(n));
  }
  T* const y = static_cast<T*>(p.a[kY].data) + first;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Part<T> part(lane + k * group, shift, n);
    if (!part.any() || !live) continue;
    float w[V];
    parameter<T>(p.a[kScale], lane + k * group, shift, n, 1.f, w);
#pragma unroll
    for (int e = 0; e < V; ++e) d[k][e] = fmaf(d[k][e], rstd, less) * w[e];
    if (p.a[kBias].here()) {
      parameter<T>(p.a[kBias], lane + k * group, shift, n, 0.f, w);
#pragma unroll
      for (int e = 0; e < V; ++e) d[k][e] += w[e];
    }
    give_part(y, part, d[k]);
  }
}

// --- backward -------------------------------------------------------------------------------------------------------------

// At 32 elements a thread, two stages, and g and xhat are made again.
constexpr int stages(int elements) { return elements > 16 ? 2 : 3; }
constexpr int room(int vec, int k, int block) { return (stages(k * vec) * 2 * k + k * vec / 4) * block * 16; }

template <class T, int kGroup, int K, bool kRms>
__global__ void __launch_bounds__(kGroup > 0 || K * kVec<T> <= 8 ? 256 : K * kVec<T> <= 16 ? 512 : 384, kGroup > 0 || K * kVec<T> <= 8 ? 2 : 1)
rows_backward_odd(const __grid_constant__ Problem p, const __grid_constant__ RowPlan q, float* partial) {
  constexpr int V = kVec<T>, kStages = stages(K * V);
  constexpr bool kKeep = K * V <= 16;
  extern __shared__ uint4 stage[];  // [stage][x, dy][k][thread], then the scale [k][quarter][thread]
  __shared__ Scratch<Sum2, kGroup> scratch[2];
  const Team<kGroup> team(1);
  const int group = team.size, lane = team.lane, n = q.length;
  const float inv_n = 1.f / static_cast<float>(n);
  const int shift = static_cast<int>(team.row * n % V);  // of all this thread's rows: the step is a multiple of V, or there is one
  float4* const scale = reinterpret_cast<float4*>(stage + kStages * 2 * K * blockDim.x);
  int turn = 0;

  float dscale[K][V], dbias[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    float w[V];
    parameter<T>(p.a[kScale], lane + k * group, shift, n, 1.f, w);
    const Part<T> part(lane + k * group, shift, n);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if (e < part.from || e >= part.to) w[e] = 0.f;  // it is multiplied by zeros, and might be NaN
      dscale[k][e] = dbias[k][e] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < V / 4; ++i) scale[(k * (V / 4) + i) * blockDim.x + threadIdx.x] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
  }

  const auto place = [&](int at, int which, int k) { return stage + ((at * 2 + which) * K + k) * blockDim.x + threadIdx.x; };
  const auto fetch = [&](int64_t row, int at) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Part<T> part(lane + k * group, shift, n);
      const bool in = row < q.rows && part.any();
      const int64_t from = in ? row * n + part.begin : 0;
      // The array's last vector: nothing behind its end.
      const int bytes = !in ? 0 : row == q.rows - 1 ? part.to * static_cast<int>(sizeof(T)) : 16;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(place(at, which, k)));
        const T* const array = static_cast<const T*>(p.a[which == 0 ? kX : kDy].data);
        copy_async(to, array + from, bytes);
      }
    }
    copies_commit();
  };
  struct Row {
    float mean, low, var;
  };
  const auto stat = [&](int64_t row) {
    return row < q.rows ? Row{get_row<T>(p, q, p.a[kMean], row), get_row<T>(p, q, p.a[kLow], row), get_row<T>(p, q, p.a[kVar], row)} : Row{};
  };

  int64_t row = team.row;
#pragma unroll
  for (int a = 0; a < kStages - 1; ++a) fetch(row + a * team.step, a);
  Row next = stat(row);
  int at = 0;
  for (int64_t top = team.top; top < q.rows; top += team.step, row += team.step) {
    fetch(row + (kStages - 1) * team.step, at == 0 ? kStages - 1 : at - 1);
    const Row s = next;
    next = stat(row + team.step);
    const float rstd = quick_inverse_root(s.var, p.eps), less = -s.low * rstd;
    const bool live = row < q.rows;
    float xhat[kKeep ? K : 1][V], g[kKeep ? K : 1][V];
    const auto read = [&](int k, const Part<T>& part, float(&xh)[V], float(&h)[V]) {
      Held<T> a, b;
      memcpy(&a, place(at, 0, k), 16);
      memcpy(&b, place(at, 1, k), 16);
      unpack<T>(a, xh);
      unpack<T>(b, h);
#pragma unroll
      for (int e = 0; e < V; ++e) xh[e] = fmaf(xh[e] - s.mean, rstd, less);
      if (!part.whole()) {
#pragma unroll
        for (int e = 0; e < V; ++e)
          if (e < part.from || e >= part.to) xh[e] = h[e] = 0.f;
      }
    };
    const auto times_scale = [&](int k, float(&h)[V]) {
#pragma unroll
      for (int i = 0; i < V / 4; ++i) {
        const float4 w = scale[(k * (V / 4) + i) * blockDim.x + threadIdx.x];
        h[4 * i] *= w.x, h[4 * i + 1] *= w.y, h[4 * i + 2] *= w.z, h[4 * i + 3] *= w.w;
      }
    };
    copies_wait<kStages - 1>();
    Sum2 sum{0.f, 0.f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int m = kKeep ? k : 0;
      const Part<T> part(lane + k * group, shift, n);
      if (!live || !part.any()) continue;
      read(k, part, xhat[m], g[m]);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        dbias[k][e] += g[m][e];
        dscale[k][e] = fmaf(g[m][e], xhat[m][e], dscale[k][e]);
      }
      times_scale(k, g[m]);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        sum.a += g[m][e];
        sum.b = fmaf(g[m][e], xhat[m][e], sum.b);
      }
    }
    sum = row_sum<kGroup>(sum, scratch[turn], 1);
    turn ^= 1;
    if (live) {
      float c0 = kRms ? 0.f : -sum.a * rstd, c1 = -sum.b * rstd;
      if (p.a[kCvar].here())
        c0 += get_row<T>(p, q, p.a[kCmean], row), c1 = fmaf(2.f * get_row<T>(p, q, p.a[kCvar], row), rstd > 0.f ? 1.f / rstd : 0.f, c1);
      c0 *= inv_n, c1 *= inv_n;
      T* const dx = static_cast<T*>(p.a[kDx].data) + row * n;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int m = kKeep ? k : 0;
        const Part<T> part(lane + k * group, shift, n);
        if (!part.any()) continue;
        if constexpr (!kKeep) {
          read(k, part, xhat[0], g[0]);
          times_scale(k, g[0]);
        }
#pragma unroll
        for (int e = 0; e < V; ++e) g[m][e] = fmaf(g[m][e], rstd, fmaf(xhat[m][e], c1, c0));
        give_part(dx, part, g[m]);
      }
    }
    at = at + 1 == kStages ? 0 : at + 1;
  }
  copies_wait<0>();
  if (partial == nullptr) return;

  float* const out = partial + static_cast<int64_t>(blockIdx.x) * 2 * n;
  if constexpr (kGroup == kBlock) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Part<T> part(lane + k * group, shift, n);
#pragma unroll
      for (int e = 0; e < V; ++e)
        if (e >= part.from && e < part.to) out[part.begin + e] = dscale[k][e], out[n + part.begin + e] = dbias[k][e];
    }
  } else {  // warps of different shifts: by columns, in turn
    float* const sums = reinterpret_cast<float*>(stage);  // [row of the block][column]
    const int mine = threadIdx.x / group, width = group * K * V;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Part<T> part(lane + k * group, shift, n);
#pragma unroll
        for (int e = 0; e < V; ++e)
          if (e >= part.from && e < part.to) sums[mine * width + part.begin + e] = which == 0 ? dscale[k][e] : dbias[k][e];
      }
      __syncthreads();
      for (int j = threadIdx.x; j < n; j += blockDim.x) {
        float s = 0.f;
        for (int m = 0; m < team.per; ++m) s += sums[m * width + j];
        out[which * n + j] = s;
      }
    }
  }
}

}  // namespace

cudaError_t rows_odd_forward(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int k16 = 16 / kVec<T>, k32 = 32 / kVec<T>;  // vectors of as many elements
#define ROWS(group, k) launch_rows(p.rms ? rows_forward_odd<T, group, k, true> : rows_forward_odd<T, group, k, false>, q, 0, stream, p, q)
    if (q.group == 32) return q.k == k16 ? ROWS(32, k16) : ROWS(32, k32);
    return ROWS(kBlock, k32);
#undef ROWS
  });
}

cudaError_t rows_odd_backward(ffi::DataType dtype, const Problem& p, const RowPlan& q, float* partial, bool sums, cudaStream_t stream) {
  const cudaError_t e = with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int V = kVec<T>, k8 = 8 / V, k16 = 16 / V, kWide = V == 4 ? k16 : 32 / V;
    const int bytes = room(V, q.k, q.block);
    float* const to = sums ? partial : nullptr;
#define ROWS(group, k) \
  launch_rows(p.rms ? rows_backward_odd<T, group, k, true> : rows_backward_odd<T, group, k, false>, q, bytes, stream, p, q, to)
    if (q.group == 32) return ROWS(32, k16);
    return q.k == k8 ? ROWS(kBlock, k8) : q.k == k16 ? ROWS(kBlock, k16) : ROWS(kBlock, kWide);
#undef ROWS
  });
  return e != cudaSuccess || !sums ? e : rows_add_sums(dtype, p, q, partial, stream);
}

}  // namespace norm
}  // namespace jaxprims
