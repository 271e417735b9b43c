// Starts sm90_f32.cuh: tensor maps, phases and the grid; and the instances that there are.
#pragma once
#include "conv/sm90_f32.cuh"

namespace jaxprims {
namespace conv {

template <bool Exact, bool Forward, int CB, int N, int Phases>
cudaError_t sm90_f32_allow() {
  using Tile = Sm90F32Tile<Exact, Forward, CB, N>;
  return sm90_allow(reinterpret_cast<const void*>(sm90_f32<Tile, Phases>), Tile::kBytes);
}

// sm90_f32_allow has run on this device. cudaErrorInvalidValue: nothing was launched, see sm90_f32_launch.h.
template <bool Exact, bool Forward, int CB, int N, int Phases>
cudaError_t sm90_f32_start(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  using Tile = Sm90F32Tile<Exact, Forward, CB, N>;
  constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  Sm90F32Args<Phases> a;
  const bool box = plan.pw > 0;
  a.mode = box ? kBox : sm90_mode(p, plan.flat);
  a.pw = plan.pw, a.ph = plan.ph, a.pn = plan.pn, a.imgs = static_cast<int32_t>(p.imgs);
  a.extent1 = p.axis[1].I, a.extent2 = p.axis[2].I;
  a.cols = static_cast<int32_t>(p.ks);
  a.chunks = static_cast<uint32_t>(sm90_ceil(p.chs, 32));
  const uint32_t tiles_n = static_cast<uint32_t>(sm90_ceil(p.ks, Tile::kChannels));
  a.tiles_n = FastDiv(tiles_n);
  a.bias = p.bias, a.residual = static_cast<const float*>(p.residual), a.bias_type = p.bias_type;
  sm90_clip(p.activation, &a.lo, &a.hi);
  a.out = static_cast<float*>(p.out_data), a.out_image = p.out.outer;
  for (int i = 0; i < kMaxSpatial; ++i) a.out_s[i] = p.out.s[i], a.out_phases[i] = p.axis[i].phases;

  // The phases, those with the most taps first: the last tiles are the small ones.
  Sm90Walk walks[kSm90Phases];
  int phases = 0;
  int32_t f[kMaxSpatial];
  for (f[0] = 0; f[0] < p.axis[0].phases; ++f[0])
    for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
      for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) {
        int at = phases++;
        if (at >= Phases) return cudaErrorInvalidValue;
        const Sm90Walk w = sm90_walk(p, plan.flip, f);
        for (; at > 0 && walks[at - 1].taps() < w.taps(); --at) walks[at] = walks[at - 1];
        walks[at] = w;
      }
  a.phases = phases;
  const uint64_t c = static_cast<uint64_t>(p.chs), n = static_cast<uint64_t>(p.imgs);
  const uint64_t I[3] = {static_cast<uint64_t>(p.axis[2].I), static_cast<uint64_t>(p.axis[1].I), static_cast<uint64_t>(p.axis[0].I)};
  int64_t tiles = 0;
  for (int i = 0; i < phases; ++i) {
    const Sm90Walk& w = walks[i];
    Sm90F32Phase& ph = a.phase[i];
    ph.first_tile = static_cast<uint32_t>(tiles);
    ph.rows = static_cast<uint32_t>(w.rows(p.imgs));
    ph.tap0 = w.tap0;
    for (int d = 0; d < kMaxSpatial; ++d) {
      ph.count[d] = w.count[d], ph.offset[d] = w.offset[d], ph.lower[d] = w.lower[d], ph.step[d] = w.step[d];
      ph.tap_step[d] = w.tap_step[d], ph.f[d] = w.f[d];
      ph.outs[d] = FastDiv(static_cast<uint32_t>(w.outs[d]));
    }
    int64_t tiles_m = sm90_ceil(ph.rows, Tile::kPixels);
    bool encoded = true;
    if (w.taps() == 0) {
    } else if (box) {
      if (plan.pw * plan.ph * plan.pn != Tile::kPixels) return cudaErrorInvalidValue;
      const int64_t boxes2 = sm90_ceil(w.outs[2], plan.pw), boxes1 = sm90_ceil(w.outs[1], plan.ph);
      ph.boxes2 = FastDiv(static_cast<uint32_t>(boxes2)), ph.boxes1 = FastDiv(static_cast<uint32_t>(boxes1));
      tiles_m = boxes2 * boxes1 * sm90_ceil(p.imgs, plan.pn);
      const uint32_t tile[4] = {32, static_cast<uint32_t>(plan.pw), static_cast<uint32_t>(plan.ph), static_cast<uint32_t>(plan.pn)};
      const uint64_t extent[4] = {c, I[0], I[1], n}, stride[3] = {4 * c, 4 * c * I[0], 4 * c * I[0] * I[1]};
      encoded = tma::encode_tiled(&a.in[i], kType, 4, p.in_data, extent, stride, tile);
    } else if (a.mode == kFlat) {
      const uint64_t extent[2] = {c, n * I[0] * I[1] * I[2]}, stride[1] = {4 * c};
      const uint32_t tile[2] = {32, Tile::kPixels};
      encoded = tma::encode_tiled(&a.in[i], kType, 2, p.in_data, extent, stride, tile);
    } else {
      const int lower[3] = {w.lower[2], w.lower[1], w.lower[0]};
      const int upper[3] = {sm90_upper(w, 2, p.axis[2].I), sm90_upper(w, 1, p.axis[1].I), sm90_upper(w, 0, p.axis[0].I)};
      const uint32_t step[3] = {static_cast<uint32_t>(w.step[2]), static_cast<uint32_t>(w.step[1]), static_cast<uint32_t>(w.step[0])};
      encoded = tma::encode_im2col(&a.in[i], kType, a.mode == kPlane ? 2 : 3, p.in_data, c, I, n, lower, upper, step, Tile::kPixels, 4);
    }
    if (!encoded || tiles_m * Tile::kPixels >= kExtentLimit) return cudaErrorInvalidValue;
    tiles += tiles_m * tiles_n;
    if (tiles >= kExtentLimit) return cudaErrorInvalidValue;
  }
  a.tiles = static_cast<uint32_t>(tiles);

  const uint64_t inner = Forward ? p.ks : p.chs, outer = Forward ? p.chs : p.ks;  // of w as it lies
  const uint64_t w_extent[3] = {inner, outer, static_cast<uint64_t>(p.taps())}, w_stride[2] = {4 * inner, 4 * inner * outer};
  const uint32_t w_box[3] = {32, Forward ? 32 : static_cast<uint32_t>(Tile::kChannels), 1};
  if (!tma::encode_tiled(&a.w, kType, 3, p.w_data, w_extent, w_stride, w_box)) return cudaErrorInvalidValue;

  const auto kernel = sm90_f32<Tile, Phases>;
  const int sms = sm90_multiprocessors();
  const unsigned blocks = tiles < sms ? static_cast<unsigned>(tiles) : static_cast<unsigned>(sms);
  kernel<<<blocks, kSm90Threads, Tile::kBytes, stream>>>(a);
  return cudaGetLastError();
}

// The instances of one direction: TF32 and exact, by tile; and two tiles for phases.
template <bool Forward>
cudaError_t sm90_f32_by_tile(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  switch (10000 * plan.strided + 1000 * plan.cb + plan.n) {
    case 2256: return plan.exact ? cudaErrorInvalidValue : sm90_f32_start<false, Forward, 2, 256, 1>(p, plan, stream);
    case 2192: return plan.exact ? cudaErrorInvalidValue : sm90_f32_start<false, Forward, 2, 192, 1>(p, plan, stream);
    case 2128: return (plan.exact ? sm90_f32_start<true, Forward, 2, 128, 1> : sm90_f32_start<false, Forward, 2, 128, 1>)(p, plan, stream);
    case 1128: return (plan.exact ? sm90_f32_start<true, Forward, 1, 128, 1> : sm90_f32_start<false, Forward, 1, 128, 1>)(p, plan, stream);
    case 12128:
      return (plan.exact ? sm90_f32_start<true, Forward, 2, 128, kSm90Phases> : sm90_f32_start<false, Forward, 2, 128, kSm90Phases>)(p, plan, stream);
    case 11128:
      return (plan.exact ? sm90_f32_start<true, Forward, 1, 128, kSm90Phases> : sm90_f32_start<false, Forward, 1, 128, kSm90Phases>)(p, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool Forward>
cudaError_t sm90_f32_prepare() {
  return first_error({sm90_f32_allow<false, Forward, 2, 256, 1>(), sm90_f32_allow<false, Forward, 2, 192, 1>(),
                      sm90_f32_allow<false, Forward, 2, 128, 1>(),
                      sm90_f32_allow<true, Forward, 2, 128, 1>(), sm90_f32_allow<false, Forward, 1, 128, 1>(),
                      sm90_f32_allow<true, Forward, 1, 128, 1>(), sm90_f32_allow<false, Forward, 2, 128, kSm90Phases>(),
                      sm90_f32_allow<true, Forward, 2, 128, kSm90Phases>(), sm90_f32_allow<false, Forward, 1, 128, kSm90Phases>(),
                      sm90_f32_allow<true, Forward, 1, 128, kSm90Phases>()});
}

}  // namespace conv
}  // namespace jaxprims
