// First layers, input gradient: dx[n, h, w, c] = sum over r, s, k of dy[n, (h + ph - r) / u, (w + pw - s) / v, k] w[r, s, c, k].
//
// The few channels c alone would leave a matrix product's columns empty, so (s, c) are its columns:
//     Z[h, q, (s, c)] = sum over r, k of dy[n, (h + ph - r) / u, q, k] w[r, s, c, k]        by mma.sync, float32
//     dx[n, h, w, c]  = sum over s of Z[h, (w + pw - s) / v, (s, c)]                        out of shared memory, s ascending
// Rows h = u h' + f of one phase f meet the same taps r = r0 + u j in rows p = h' + base - j of dy: with a stride, too, only products
// that exist are made. A tile is TH rows h' by QT columns q, flat: tap j is a shift of the flat index by (J - 1 - j) QT. Each warp has
// 64 flat rows and all columns; 16 channels of all rows of dy that a tile needs are one stage of two, brought by cp.async; the 16-byte
// halves of a pixel's 32 bytes are swapped in every second group of four pixels, so that ldmatrix meets no bank twice. The filter
// stays in shared memory in the order in which lanes take it.
// Measured (one H200, bf16): paper1 0.85-0.87 ms, ResNet's stem 0.96; cuDNN 5.4, 3.2.
#pragma once
#include "common/async_copy.cuh"
#include "common/fastdiv.h"
#include "common/pack.cuh"
#include "common/ptx.cuh"
#include "common/warp_mma.cuh"
#include "conv/first.h"

namespace jaxprims {
namespace conv {
namespace first {

struct InputGradArgs {
  FirstShape s;
  const void *dy, *w;
  void* dx;
  int64_t work;
  int phases, tiles_h, tiles_w, th, qt, wt, k16, stage, z_pitch;  // stage: pixels of one buffer
  FastDiv by_qt, by_row, by_c;                                    // by_row: C columns of a tile's row
};

template <class T, int NT>
__global__ void __launch_bounds__(256, NT <= 3 ? 2 : 1) first_input_grad(const __grid_constant__ InputGradArgs a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const FirstShape& s = a.s;
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  uint2* filters = reinterpret_cast<uint2*>(shared);
  unsigned char* stages = shared + s.R * a.k16 * NT * 256;
  float* z = reinterpret_cast<float*>(stages);
  const uint32_t stage0 = shared_address(stages);
  const int columns = s.S * s.C;

  const auto load_filters = [&](int64_t b) {
    const uint16_t* w = static_cast<const uint16_t*>(a.w) + b * s.w_b;
#pragma unroll 4
    for (int e = tid; e < s.R * a.k16 * NT * 32; e += threads) {
      const int l = e % 32, nt = e / 32 % NT, rest = e / (32 * NT), kk = rest % a.k16, r = rest / a.k16;
      const int column = nt * 8 + l / 4, k = kk * 16 + l % 4 * 2;
      uint2 v = make_uint2(0, 0);
      if (column < columns) {
        const uint16_t* at = w + static_cast<int64_t>(r * columns + column) * s.K + k;
        if (k < s.K) v.x = *reinterpret_cast<const uint32_t*>(at);
        if (k + 8 < s.K) v.y = *reinterpret_cast<const uint32_t*>(at + 8);
      }
      filters[e] = v;
    }
  };

  int64_t loaded = -1;
  const int64_t first = a.work * blockIdx.x / gridDim.x, last = a.work * (blockIdx.x + 1) / gridDim.x;
  for (int64_t work = first; work < last; ++work) {
    int64_t rest = work;
    const int f = static_cast<int>(rest % a.phases);
    rest /= a.phases;
    const int w0 = static_cast<int>(rest % a.tiles_w) * a.wt;
    rest /= a.tiles_w;
    const int h0 = static_cast<int>(rest % a.tiles_h) * a.th;
    rest /= a.tiles_h;
    const int64_t n = rest % s.N, b = rest / s.N;
    // Phase: r = r0 + u j, p = h' + base - j.
    int r0 = (f + s.ph) % s.u;
    r0 += r0 < 0 ? s.u : 0;
    const int base = (f + s.ph - r0) / s.u, taps = r0 < s.R ? (s.R - r0 + s.u - 1) / s.u : 0;
    const int p0 = h0 + base - (taps - 1), rows = a.th + taps - 1;
    int q0 = 0;
    if (a.tiles_w > 1) {
      const int low = w0 + s.pw - s.S + 1;
      q0 = low > 0 ? (low + s.v - 1) / s.v : 0;
    }
    const uint16_t* dy = static_cast<const uint16_t*>(a.dy) + b * s.y_b + n * s.P * s.Q * s.K;
    const auto load_stage = [&](int kk) {
      const uint32_t to = stage0 + (kk & 1) * a.stage * 32;
      for (int e = tid; e < rows * a.qt * 2; e += threads) {
        const int px = e / 2, half = e % 2, k = kk * 16 + half * 8;
        uint32_t row, col;
        a.by_qt.divmod(px, row, col);
        const int p = p0 + static_cast<int>(row), q = q0 + static_cast<int>(col);
        const bool inside = p >= 0 && p < s.P && q < s.Q && k < s.K;
        const uint16_t* from = inside ? dy + (static_cast<int64_t>(p) * s.Q + q) * s.K + k : dy;
        copy_async(to + px * 32 + ((half ^ (px >> 2 & 1)) << 4), from, inside ? 16 : 0);
      }
      copies_commit();
    };

    if (b != loaded) {
      load_filters(b);  // the last tile ended with a barrier
      loaded = b;
    }
    float acc[4][NT][4] = {};
    if (taps > 0) {
      load_stage(0);
      const int lrow = warp * 64 + (lane & 15), lhalf = lane >> 4;
      for (int kk = 0; kk < a.k16; ++kk) {
        copies_wait<0>();
        __syncthreads();
        if (kk + 1 < a.k16) load_stage(kk + 1);
        const uint32_t from = stage0 + (kk & 1) * a.stage * 32;
        const uint2* fb = filters + (r0 * a.k16 + kk) * NT * 32 + lane;
        const int tap_step = s.u * a.k16 * NT * 32;
        int px = lrow + (taps - 1) * a.qt;
#pragma unroll 1
        for (int j = 0; j < taps; ++j) {
          const uint32_t at = from + px * 32 + ((lhalf ^ (px >> 2 & 1)) << 4);
          uint32_t m[4][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) load_matrices(m[i], at + i * 512);
#pragma unroll
          for (int c = 0; c < NT; ++c) {
            const uint2 v = fb[c * 32];
#pragma unroll
            for (int i = 0; i < 4; ++i) mma_k16(acc[i][c], m[i], v.x, v.y, T{});
          }
          fb += tap_step;
          px -= a.qt;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < NT; ++c) {
        float* at = z + (warp * 64 + i * 16 + g) * a.z_pitch + c * 8 + 2 * t;
        *reinterpret_cast<float2*>(at) = make_float2(acc[i][c][0], acc[i][c][1]);
        *reinterpret_cast<float2*>(at + 8 * a.z_pitch) = make_float2(acc[i][c][2], acc[i][c][3]);
      }
    __syncthreads();
    T* dx = static_cast<T*>(a.dx) + b * s.x_b + n * s.H * s.W * s.C;
    for (int e = tid; e < a.th * a.wt * s.C; e += threads) {
      uint32_t hh, in_row, ww, c;
      a.by_row.divmod(e, hh, in_row);
      a.by_c.divmod(in_row, ww, c);
      const int h = s.u * (h0 + static_cast<int>(hh)) + f, w = w0 + static_cast<int>(ww);
      if (h >= s.H || w >= s.W) continue;
      const int x = w + s.pw;
      int s0 = x % s.v;
      s0 += s0 < 0 ? s.v : 0;
      int q = (x - s0) / s.v;
      float sum = 0.f;
      const float* from = z + static_cast<int>(hh) * a.qt * a.z_pitch + c;
      for (int col = s0; col < s.S && q >= 0; col += s.v, --q)
        if (q < s.Q) sum += from[(q - q0) * a.z_pitch + col * s.C];
      dx[(static_cast<int64_t>(h) * s.W + w) * s.C + c] = from_float<T>(sum);
    }
    __syncthreads();
  }
}

template <class T>
cudaError_t input_grad(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  InputGradArgs a;
  a.s = f.s;
  a.dy = p.in_data, a.w = p.w_data, a.dx = p.out_data;
  a.phases = f.s.u < f.s.H ? f.s.u : f.s.H;
  a.tiles_h = static_cast<int>(first_div_up(first_div_up(f.s.H, f.s.u), f.th)), a.tiles_w = static_cast<int>(first_div_up(f.s.W, f.wt));
  a.th = f.th, a.qt = f.qt, a.wt = f.wt, a.k16 = static_cast<int>(first_div_up(f.s.K, 16));
  a.stage = static_cast<int>(first_div_up(f.s.R, f.s.u) - 1) * f.qt + 64 * f.warps, a.z_pitch = first_z_pitch(f.nt);
  a.work = f.s.batch * f.s.N * a.tiles_h * a.tiles_w * a.phases;
  a.by_qt = FastDiv(f.qt), a.by_row = FastDiv(f.wt * f.s.C), a.by_c = FastDiv(f.s.C);
  const unsigned blocks = static_cast<unsigned>(f.blocks), threads = 32 * f.warps;
  switch (f.nt) {
    case 2: first_input_grad<T, 2><<<blocks, threads, f.shared, stream>>>(a); break;
    case 3: first_input_grad<T, 3><<<blocks, threads, f.shared, stream>>>(a); break;
    case 4: first_input_grad<T, 4><<<blocks, threads, f.shared, stream>>>(a); break;
    case 5: first_input_grad<T, 5><<<blocks, threads, f.shared, stream>>>(a); break;
    case 6: first_input_grad<T, 6><<<blocks, threads, f.shared, stream>>>(a); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
