// First layers forward: y[n, p, q, k] = act( sum over r, s, c of x[n, p u + r - ph, q v + s - pw, c] w[r, s, c, k] + bias + residual ).
//
// A matrix product: rows are 256 output pixels of one image in a row (32 for each of eight warps), columns 8 NT of K, the reduction
// walks over (r, groups of 4 filter columns s, 4 channels): one k16 step of mma.sync each. The rows of x that a tile needs lie in
// shared memory with channels padded to 4, so that a pixel is 8 bytes. Thread t of a quad takes the pixel s0 + t as its four k of
// an operand: one 8-byte load gives them, neighbouring rows overlap, and strides cost nothing. Filters are put into shared memory
// once per block in the order in which lanes take them: two 8-wide tiles are one 16-byte load. Filter columns past S read
// another pixel of the image: they are masked, since it may be Inf.
// Blocks are persistent with neighbouring tiles; the next tile's pixels are loaded while this one is multiplied. The result goes
// through shared memory to 16-byte stores; its order of sums is fixed.
// Cost: 4 / C times the filter columns rounded up to 4 of the counted products; one read of x per tile, mostly from L2.
// Measured (one H200, bf16): paper1 (N128 C3 128^2 K96 11x11) 0.69-0.72 ms, ResNet's stem (N256 224^2 K64 7x7 s2) 0.59; cuDNN 3.68, 1.80.
// Counters of paper1: shared memory 46 %, issue 35 % busy: latency of loads that are not asked for ahead, two warps a scheduler.
#pragma once
#include "common/act.cuh"
#include "common/fastdiv.h"
#include "common/pack.cuh"
#include "common/ptx.cuh"
#include "common/warp_mma.cuh"
#include "conv/first.h"

namespace jaxprims {
namespace conv {
namespace first {

template <class T>
__device__ __forceinline__ uint32_t pack2(float a, float b) {
  Pack<T, 2> p;
  p.v[0] = from_float<T>(a), p.v[1] = from_float<T>(b);
  return *reinterpret_cast<const uint32_t*>(&p);
}

struct ForwardArgs {
  FirstShape s;
  const void *x, *w, *bias, *residual;
  void* y;
  Type bias_type, residual_type;
  int64_t bias_b, residual_b;
  int work, per_image;  // tiles: in all, of an image
  int chunks, halo, buffers, pitch, groups4, activation;  // buffers: windows for a tile's and the next tile's pixels
  FastDiv by_q, by_pitch;
};

__device__ __forceinline__ float load_typed(Type type, const void* p, int64_t at) {
  if (type == Type::kF32) return static_cast<const float*>(p)[at];
  if (type == Type::kF16) return to_float(static_cast<const __half*>(p)[at]);
  return to_float(static_cast<const __nv_bfloat16*>(p)[at]);
}

// The rows of x that a tile needs, for Rows output pixels from i0 on.
struct Window {
  const uint16_t* image;
  int i0, p0, h0, pixels;
};
template <int Rows>
__device__ __forceinline__ Window window(const ForwardArgs& a, int work, int* part, int* n) {  // part: of (b, chunk of K)
  const FirstShape& s = a.s;
  const int rest = work / a.per_image, tile = work - rest * a.per_image;
  *part = rest / s.N, *n = rest - *part * s.N;
  Window o;
  o.image = static_cast<const uint16_t*>(a.x) + *part / a.chunks * s.x_b + static_cast<int64_t>(*n) * s.H * s.W * s.C;
  o.i0 = tile * Rows;
  o.p0 = a.by_q.div(o.i0);
  const int last = o.i0 + Rows < s.P * s.Q ? o.i0 + Rows - 1 : s.P * s.Q - 1;
  o.h0 = o.p0 * s.u - s.ph;
  o.pixels = ((static_cast<int>(a.by_q.div(last)) - o.p0) * s.u + s.R) * a.pitch;
  return o;
}
__device__ __forceinline__ uint2 pixel(const ForwardArgs& a, const Window& o, int i) {
  const FirstShape& s = a.s;
  uint32_t row, col;
  a.by_pitch.divmod(i, row, col);
  const int h = o.h0 + static_cast<int>(row), w = static_cast<int>(col) - s.pw;
  uint2 v = make_uint2(0, 0);
  if (h >= 0 && h < s.H && w >= 0 && w < s.W) {
    const uint16_t* at = o.image + (h * s.W + w) * s.C;
    v.x = at[0];
    if (s.C > 1) v.x |= static_cast<uint32_t>(at[1]) << 16;
    if (s.C > 2) v.y = at[2];
    if (s.C > 3) v.y |= static_cast<uint32_t>(at[3]) << 16;
  }
  return v;
}

// Bias, residual, activation and the store of a warp's 16 rows from pixel i0 on, through its shared memory.
template <class T, int NT>
__device__ __forceinline__ void finish_rows(const ForwardArgs& a, const float (&acc)[NT][4], unsigned char* out, const float* bias,
                                            int part, int n, int i0) {
  constexpr int kColumns = NT * 8, kPitch = kColumns + 8;
  const FirstShape& s = a.s;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pixels = s.P * s.Q;
  const int64_t batch = part / a.chunks, image = static_cast<int64_t>(n) * pixels * s.K;
  const int k0 = part % a.chunks * kColumns;
  T* y = static_cast<T*>(a.y) + batch * s.y_b + image + k0;
  if (a.residual == nullptr && a.activation <= static_cast<int>(Act::kRelu)) {
    const bool relu = a.activation == static_cast<int>(Act::kRelu);
    T* tile = reinterpret_cast<T*>(out);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(bias + j * 8 + 2 * t);
      float v[4] = {acc[j][0] + c.x, acc[j][1] + c.y, acc[j][2] + c.x, acc[j][3] + c.y};
      if (relu) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = act_apply(Act::kRelu, v[e]);
      }
      *reinterpret_cast<uint32_t*>(tile + g * kPitch + j * 8 + 2 * t) = pack2<T>(v[0], v[1]);
      *reinterpret_cast<uint32_t*>(tile + (g + 8) * kPitch + j * 8 + 2 * t) = pack2<T>(v[2], v[3]);
    }
    __syncwarp();
#pragma unroll
    for (int e = lane; e < 16 * NT; e += 32) {
      const int m = e / NT, j = e % NT;
      if (i0 + m < pixels && k0 + j * 8 < s.K)
        *reinterpret_cast<uint4*>(y + static_cast<int64_t>(i0 + m) * s.K + j * 8) =
            *reinterpret_cast<const uint4*>(tile + m * kPitch + j * 8);
    }
    return;
  }
  float* tile = reinterpret_cast<float*>(out);  // float32, eight rows at a time
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(bias + j * 8 + 2 * t);
      *reinterpret_cast<float2*>(tile + g * kPitch + j * 8 + 2 * t) = make_float2(acc[j][2 * half] + c.x, acc[j][2 * half + 1] + c.y);
    }
    __syncwarp();
#pragma unroll 1
    for (int e = lane; e < 8 * kColumns; e += 32) {
      const int m = e / kColumns, k = e % kColumns, i = i0 + half * 8 + m;
      if (i >= pixels || k0 + k >= s.K) continue;
      const int64_t at = static_cast<int64_t>(i) * s.K + k;
      float v = tile[m * kPitch + k];
      if (a.residual != nullptr) v += load_typed(a.residual_type, a.residual, batch * a.residual_b + image + k0 + at);
      y[at] = from_float<T>(act_apply(static_cast<Act>(a.activation), v));
    }
  }
}

template <class T, int NT>
__global__ void __launch_bounds__(256, NT <= 8 ? 2 : 1) first_forward(const __grid_constant__ ForwardArgs a) {
  constexpr int kColumns = NT * 8, kPitch = kColumns + 8;  // of the result's rows in shared memory
  extern __shared__ __align__(16) unsigned char shared[];
  const FirstShape& s = a.s;
  const int steps = s.R * a.groups4;
  uint4* filters = reinterpret_cast<uint4*>(shared);
  float* bias = reinterpret_cast<float*>(filters + steps * (NT / 2) * 32);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  unsigned char* out = reinterpret_cast<unsigned char*>(bias + kColumns) + warp * (16 * kPitch * 2);
  uint2* halo = reinterpret_cast<uint2*>(reinterpret_cast<unsigned char*>(bias + kColumns) + 8 * 16 * kPitch * 2);
  const int pixels = s.P * s.Q;

  const auto load_filters = [&](int part) {
    const int64_t b = part / a.chunks;
    const int k0 = part % a.chunks * kColumns;
    const uint16_t* w = static_cast<const uint16_t*>(a.w) + b * s.w_b + k0;
    for (int e = tid; e < steps * (NT / 2) * 32; e += 256) {  // what a lane takes: channels of two columns, eight apart
      const int l = e % 32, pair = e / 32 % (NT / 2), step = e / (16 * NT), r = step / a.groups4;
      const int col = (step - r * a.groups4) * 4 + l % 4, k = pair * 16 + l / 4;
      const uint16_t* at = w + static_cast<int64_t>(r * s.S + col) * s.C * s.K + k;
      uint32_t v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = i % 4, k8 = i / 4 * 8;
        v[i] = col < s.S && c < s.C && k0 + k + k8 < s.K ? at[c * s.K + k8] : 0;
      }
      filters[e] = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
    }
    for (int k = tid; k < kColumns; k += 256)
      bias[k] = a.bias != nullptr && k0 + k < s.K ? load_typed(a.bias_type, a.bias, b * a.bias_b + k0 + k) : 0.f;
  };

  const int first = static_cast<int>(static_cast<int64_t>(a.work) * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(static_cast<int64_t>(a.work) * (blockIdx.x + 1) / gridDim.x);
  int part, n, loaded = -1;
  Window now = window<kFirstForwardRows>(a, first, &part, &n);
  for (int i = tid; i < now.pixels; i += 256) halo[i] = pixel(a, now, i);
  int buffer = 0;
  const uint32_t mask = s.S % 4 == 0 || t < s.S % 4 ? 0xFFFFFFFFu : 0u;

  for (int work = first; work < last; ++work) {
    if (part != loaded) load_filters(part), loaded = part;
    __syncthreads();
    const uint2* from = halo + buffer * a.halo;
    uint2* to = halo + (buffer ^ 1) * a.halo;
    int next_part = part, next_n = n;
    Window next = now;
    next.pixels = 0;
    if (work + 1 < last) next = window<kFirstForwardRows>(a, work + 1, &next_part, &next_n);

    const uint2* row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int i = now.i0 + warp * 32 + j * 8 + g;
      i = i < pixels ? i : pixels - 1;
      const int p = a.by_q.div(i), q = i - p * s.Q;
      row[j] = from + (p - now.p0) * s.u * a.pitch + q * s.v + t;
    }
    float acc[2][NT][4] = {};
    const uint4* b = filters + lane;
    for (int r = 0; r < s.R; ++r) {
      uint2 ahead[2];
      const int i0 = r * 512 + tid, i1 = i0 + 256;
      if (i0 < next.pixels) ahead[0] = pixel(a, next, i0);
      if (i1 < next.pixels) ahead[1] = pixel(a, next, i1);
      const int at = r * a.pitch;
#pragma unroll 1
      for (int sg = 0; sg < a.groups4; ++sg) {
        uint2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = row[j][at + sg * 4];
        if (sg == a.groups4 - 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j].x &= mask, v[j].y &= mask;
        }
        const uint32_t a0[4] = {v[0].x, v[1].x, v[0].y, v[1].y}, a1[4] = {v[2].x, v[3].x, v[2].y, v[3].y};
#pragma unroll
        for (int j = 0; j < NT / 2; ++j) {
          const uint4 f = b[j * 32];
          mma_k16(acc[0][2 * j], a0, f.x, f.y, T{});
          mma_k16(acc[1][2 * j], a1, f.x, f.y, T{});
          mma_k16(acc[0][2 * j + 1], a0, f.z, f.w, T{});
          mma_k16(acc[1][2 * j + 1], a1, f.z, f.w, T{});
        }
        b += NT / 2 * 32;
      }
      if (i0 < next.pixels) to[i0] = ahead[0];
      if (i1 < next.pixels) to[i1] = ahead[1];
    }
    for (int i = s.R * 512 + tid; i < next.pixels; i += 256) to[i] = pixel(a, next, i);

#pragma unroll
    for (int half = 0; half < 2; ++half) finish_rows<T, NT>(a, acc[half], out, bias, part, n, now.i0 + warp * 32 + half * 16);
    now = next, part = next_part, n = next_n;
    buffer ^= 1;
    if (part != loaded) __syncthreads();  // all are done with the filters
  }
}

inline ForwardArgs forward_args(const Problem& p, const FirstPlan& f, int rows) {
  ForwardArgs a;
  a.s = f.s;
  a.x = p.in_data, a.w = p.w_data, a.y = p.out_data, a.bias = p.bias, a.residual = p.residual;
  a.bias_type = p.bias_type, a.residual_type = p.residual_type, a.bias_b = p.bias_b, a.residual_b = p.residual_b;
  a.per_image = static_cast<int>(first_div_up(int64_t{f.s.P} * f.s.Q, rows));
  a.chunks = f.chunks, a.halo = f.halo, a.buffers = f.buffers, a.pitch = first_pitch(f.s), a.groups4 = first_groups4(f.s), a.activation = p.activation;
  a.work = static_cast<int>(f.s.batch * f.chunks * f.s.N * a.per_image);
  a.by_q = FastDiv(f.s.Q), a.by_pitch = FastDiv(a.pitch);
  return a;
}

template <class T>
cudaError_t forward(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  const ForwardArgs a = forward_args(p, f, kFirstForwardRows);
  const unsigned blocks = static_cast<unsigned>(f.blocks);
  switch (f.nt) {
    case 12: first_forward<T, 12><<<blocks, 256, f.shared, stream>>>(a); break;
    case 8: first_forward<T, 8><<<blocks, 256, f.shared, stream>>>(a); break;
    case 4: first_forward<T, 4><<<blocks, 256, f.shared, stream>>>(a); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
