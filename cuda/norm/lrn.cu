// Local response normalisation across channels, forward, tangent and backward: what lrn_vector.cu does not take.
//   d_c = k + alpha * sum_{j in [c - lo, c + hi]} x_j^2,  lo = size / 2, hi = (size - 1) / 2,   y_c = x_c d_c^-beta
//   yd_c = xd_c d_c^-beta - 2 alpha beta x_c d_c^(-beta-1) sum_{j in window(c)} x_j xd_j
//   dx_j = dy_j d_j^-beta - 2 alpha beta x_j sum_{c in [j - hi, j + lo]} dy_c x_c d_c^(-beta-1)
//
// Layout   [outer, channels, inner] row-major: inner = 1 is NHWC, inner = H*W is NCHW. A position is an (outer, inner) pair.
// Work     a block stages `positions` x (`tile` + halo) channels of x (and xd or dy) in shared memory as float32, consecutive
//          threads on consecutive addresses, and computes `tile` channels of each position from there.
// Cost     one read of each operand (and of the halo), one write; bound: memory for small windows.
#include <initializer_list>

#include "common/pack.cuh"
#include "norm/lrn.h"

namespace jaxprims {
namespace norm {
namespace {

enum class Mode { kForward, kTangent, kBackward };
constexpr int kBlock = 256;
constexpr int64_t kShared = 48 * 1024;

struct Tiling {
  int tile, positions;
  int64_t strips, blocks;
  int halo;      // channels staged on either side: size - 1
  size_t bytes;
};

template <class T, Mode kMode>
__global__ void __launch_bounds__(kBlock)
lrn_tile(const T* __restrict__ x, const T* __restrict__ v, T* __restrict__ out, const LrnShape s, const Tiling t) {
  extern __shared__ float shared[];
  const int width = t.tile + 2 * t.halo, lo = s.size / 2, hi = (s.size - 1) / 2;
  float* const xs = shared;                        // [positions][width]
  float* const vs = shared + t.positions * width;  // xd; or dy, then dy * x * d^(-beta-1)
  const int64_t strip = blockIdx.x % t.strips, q0 = blockIdx.x / t.strips * t.positions, c0 = strip * t.tile;
  const int64_t positions = s.outer * s.inner, total = positions * s.channels;
  const bool last = s.inner == 1;  // channels innermost: neighbours in memory are channels

  auto place = [&](int64_t q, int64_t c) {
    const int64_t o = last ? q : q / s.inner;
    return (o * s.channels + c) * s.inner + (q - o * s.inner);
  };
  for (int e = threadIdx.x; e < t.positions * width; e += kBlock) {
    const int p = last ? e / width : e % t.positions, w = last ? e % width : e / t.positions;
    const int64_t q = q0 + p, c = c0 + w - t.halo;
    float a = 0.f, b = 0.f;
    if (q < positions && c >= 0 && c < s.channels) {
      const int64_t i = place(q, c);
      a = to_float(x[s.x_period == total ? i : i % s.x_period]);
      if (kMode != Mode::kForward) b = to_float(v[s.d_period == total ? i : i % s.d_period]);
    }
    xs[p * width + w] = a;
    if (kMode != Mode::kForward) vs[p * width + w] = b;
  }
  __syncthreads();

  auto scale_at = [&](const float* row, int w) {  // d of the channel at w of a staged row
    float sum = 0.f;
    for (int j = w - lo; j <= w + hi; ++j) sum += row[j] * row[j];
    return s.k + s.alpha * sum;
  };

  if (kMode == Mode::kBackward) {
    // Own first terms are taken before vs is overwritten; the halo's are not needed.
    const int inside = t.tile + lo + hi;  // channels [c0 - hi, c0 + tile + lo)
    for (int e = threadIdx.x; e < t.positions * inside; e += kBlock) {
      const int p = e / inside, w = t.halo - hi + e % inside;
      const float* const row = xs + p * width;
      const int64_t c = c0 + w - t.halo;
      const bool real = c >= 0 && c < s.channels;  // d of a channel that is not there may be 0
      vs[p * width + w] = real ? vs[p * width + w] * row[w] * powf(scale_at(row, w), -s.beta - 1.f) : 0.f;
    }
    __syncthreads();
  }

  for (int e = threadIdx.x; e < t.positions * t.tile; e += kBlock) {
    const int p = last ? e / t.tile : e % t.positions, w = (last ? e % t.tile : e / t.positions) + t.halo;
    const int64_t q = q0 + p, c = c0 + w - t.halo;
    if (q >= positions || c >= s.channels) continue;
    const int64_t i = place(q, c);
    const float* const row = xs + p * width;
    const float* const other = vs + p * width;
    const float d = scale_at(row, w), factor = powf(d, -s.beta);
    float y;
    if (kMode == Mode::kForward) {
      y = row[w] * factor;
    } else if (kMode == Mode::kTangent) {
      float sum = 0.f;
      for (int j = w - lo; j <= w + hi; ++j) sum += row[j] * other[j];
      y = other[w] * factor - 2.f * s.alpha * s.beta * row[w] * powf(d, -s.beta - 1.f) * sum;
    } else {
      float sum = 0.f;
      for (int j = w - hi; j <= w + lo; ++j) sum += other[j];
      const float dy = to_float(v[s.d_period == total ? i : i % s.d_period]);
      y = dy * factor - 2.f * s.alpha * s.beta * row[w] * sum;
    }
    out[i] = from_float<T>(y);
  }
}

Tiling tiling(const LrnShape& s) {
  Tiling t;
  t.halo = s.size - 1;
  t.tile = static_cast<int>(s.channels < (s.inner == 1 ? 256 : 16) ? s.channels : (s.inner == 1 ? 256 : 16));
  t.positions = s.inner == 1 ? (t.tile < 256 ? 256 / t.tile : 1) : 32;
  auto bytes = [&] { return int64_t{2} * t.positions * (t.tile + 2 * t.halo) * 4; };
  while (t.positions > 1 && bytes() > kShared) t.positions /= 2;
  while (t.tile > 1 && bytes() > kShared) t.tile /= 2;
  t.bytes = static_cast<size_t>(bytes());
  t.strips = ceil_div(s.channels, t.tile);
  t.blocks = ceil_div(s.outer * s.inner, t.positions) * t.strips;
  return t;
}

template <Mode kMode>
cudaError_t run(ffi::DataType dtype, const void* x, const void* v, void* out, const LrnShape& s, cudaStream_t stream) {
  const Tiling t = tiling(s);
  if (t.bytes > static_cast<size_t>(kShared) || t.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  auto go = [&](auto zero) {
    using T = decltype(zero);
    lrn_tile<T, kMode><<<static_cast<unsigned>(t.blocks), kBlock, t.bytes, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(v), static_cast<T*>(out), s, t);
    return cudaGetLastError();
  };
  switch (dtype) {
    case ffi::DataType::F32: return go(float{});
    case ffi::DataType::F16: return go(__half{});
    case ffi::DataType::BF16: return go(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

bool vectors(ffi::DataType dtype, const LrnShape& s, std::initializer_list<const void*> arrays) {
  bool aligned = true;
  for (const void* a : arrays) aligned = aligned && reinterpret_cast<uintptr_t>(a) % 16 == 0;
  return lrn_vector_refuses(s, static_cast<int64_t>(ffi::ByteWidth(dtype)), aligned) == nullptr;
}

}  // namespace

cudaError_t lrn(ffi::DataType dtype, const void* x, void* y, const LrnShape& s, cudaStream_t stream) {
  if (vectors(dtype, s, {x, y})) return lrn_vector(dtype, x, nullptr, y, s, stream);
  return run<Mode::kForward>(dtype, x, x, y, s, stream);
}
cudaError_t lrn_jvp(ffi::DataType dtype, const void* x, const void* xd, void* yd, const LrnShape& s, cudaStream_t stream) {
  return run<Mode::kTangent>(dtype, x, xd, yd, s, stream);
}
cudaError_t lrn_bwd(ffi::DataType dtype, const void* x, const void* dy, void* dx, const LrnShape& s, cudaStream_t stream) {
  if (vectors(dtype, s, {x, dy, dx})) return lrn_vector(dtype, x, dy, dx, s, stream);
  return run<Mode::kBackward>(dtype, x, dy, dx, s, stream);
}

}  // namespace norm
}  // namespace jaxprims
