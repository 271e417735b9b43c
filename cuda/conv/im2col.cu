// patches[image, o.., r.., ch] = in[image, (o*a + r*b + c)/e.., ch], 0 where the division is not exact or out of range.
// Work     a thread moves one vector of channels (16 bytes where channels and address allow, else one element) at a time;
//          neighbours move neighbours, so stores are full lines, and loads are along channels and then along the last axis.
// Cost     writes taps * channels elements per output pixel; bound: memory, with taps times the traffic of the input.
#include "conv/convolve.h"

#include "common/fastdiv.h"

namespace jaxprims {
namespace conv {
namespace {

struct Args {
  Axis axis[kMaxSpatial];
  FastDiv vectors, taps, pixels, r1, r2, o1, o2;  // vectors of a tap; taps and pixels of an image; extents of filter and output
  int64_t in_outer, s[kMaxSpatial];               // strides in vectors
  uint32_t total;                                 // vectors of this round
};

template <class V>
__global__ void __launch_bounds__(256) im2col(const V* __restrict__ in, V* __restrict__ out, const __grid_constant__ Args a) {
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < a.total; i += gridDim.x * 256) {
    uint32_t rest, v, row, tap, image, pixel, r[kMaxSpatial], o[kMaxSpatial];
    a.vectors.divmod(i, rest, v);
    a.taps.divmod(rest, row, tap);
    a.pixels.divmod(row, image, pixel);
    a.r2.divmod(tap, rest, r[2]);
    a.r1.divmod(rest, r[0], r[1]);
    a.o2.divmod(pixel, rest, o[2]);
    a.o1.divmod(rest, o[0], o[1]);
    bool inside = true;
    int64_t at = image * a.in_outer + v;
    for (int d = 0; d < kMaxSpatial; ++d) {
      const Axis& x = a.axis[d];
      const int32_t t = static_cast<int32_t>(o[d]) * x.a + static_cast<int32_t>(r[d]) * x.b + x.c;
      const int32_t at_d = x.e == 1 ? t : t / x.e;
      inside = inside && t >= 0 && at_d * x.e == t && at_d < x.I;
      at += at_d * a.s[d];
    }
    out[i] = inside ? in[at] : V{};
  }
}

template <class V>
cudaError_t write(const Problem& p, int64_t first, int64_t count, void* patches, cudaStream_t stream) {
  const int64_t per = sizeof(V) / bytes_of(p.in_type), total = count * p.pixels() * p.taps() * (p.chs / per);
  Args a;
  const auto div = [](int64_t d) { return FastDiv(static_cast<uint32_t>(d)); };
  for (int d = 0; d < kMaxSpatial; ++d) a.axis[d] = p.axis[d], a.s[d] = p.in.s[d] / per;
  a.vectors = div(p.chs / per), a.taps = div(p.taps()), a.pixels = div(p.pixels()), a.r1 = div(p.axis[1].R), a.r2 = div(p.axis[2].R);
  a.o1 = div(p.axis[1].O), a.o2 = div(p.axis[2].O);
  a.in_outer = p.in.outer / per, a.total = static_cast<uint32_t>(total);  // im2col.h keeps it below 2^30
  const int64_t blocks = (total + 255) / 256;
  const V* in = static_cast<const V*>(p.in_data) + first * a.in_outer;
  im2col<V><<<static_cast<unsigned>(blocks < 132 * 64 ? blocks : 132 * 64), 256, 0, stream>>>(in, static_cast<V*>(patches), a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t im2col_launch(const Problem& p, const Im2colPlan& plan, void* workspace, cudaStream_t stream) {
  const int64_t per = 16 / bytes_of(p.in_type);
  bool wide = p.chs % per == 0 && reinterpret_cast<uintptr_t>(p.in_data) % 16 == 0 && reinterpret_cast<uintptr_t>(workspace) % 16 == 0;
  for (const int64_t s : p.in.s) wide = wide && s % per == 0;  // dense: true where channels are
  for (int64_t first = 0; first < p.imgs; first += plan.images) {
    const int64_t count = p.imgs - first < plan.images ? p.imgs - first : plan.images;
    cudaError_t e = wide                       ? write<uint4>(p, first, count, workspace, stream)
                    : bytes_of(p.in_type) == 4 ? write<uint32_t>(p, first, count, workspace, stream)
                                               : write<uint16_t>(p, first, count, workspace, stream);
    if (e == cudaSuccess) e = convolve(im2col_product(p, workspace, first, count), nullptr, 0, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace conv
}  // namespace jaxprims
