// Which convolutions the Hopper kernels take, with which tile, and where every number of their launch comes from: plain C++.
//
// Taken: float16 and bfloat16, channels last (x, y) and HWIO (w) dense, no groups, no batched filters, C and K multiples of 8.
// The reduction walks over (tap, chunk of 64 channels); a chunk of 64 of one axis by 64 of another is 8 KiB, the unit of all tiles.
#pragma once
#include <cstdint>
#include <limits>

#include "conv/problem.h"

namespace jaxprims {
namespace conv {

constexpr int kSm90Phases = 9;      // phases of a strided input gradient in one launch: two tensor maps each, in 4 KiB of arguments
constexpr int kSm90Workers = 132;   // shares of a weight gradient's reduction: fixed, so that the bits are the same on every GPU
constexpr int kSm90Chunks = 8;      // a tile has at most 8 chunks of 64 x 64 sums
// Two unfinished tiles for each worker, in float32. jaxprims/conv/workspace.py declares the same number of bytes.
constexpr int64_t kSm90Workspace = int64_t{2} * kSm90Workers * kSm90Chunks * 64 * 64 * 4;

struct Sm90Plan {
  const char* reason = "not looked at";  // null where the kernels take the problem
  int mb = 0, nb = 0;                    // a tile of the product is 64 mb rows x 64 nb columns
  bool swap = false;                     // forward, input gradient: rows are channels; weight gradient: rows are (tap, c)
  bool flat = false;                     // 1 x 1, stride 1, no padding: the pixels are one list, no im2col
  bool strided = false;                  // input gradient of a strided convolution: phases
  bool flip = false;                     // the filter lies reversed
  int pw = 0, ph = 0, pn = 0;            // a tile's pixels are a box of so many columns, rows, images; 0: a list, by im2col
};

// One phase of one tensor's pixels: affine in the output position o' and the tap j per axis, both ascending.
struct Sm90Walk {
  int32_t outs[kMaxSpatial], count[kMaxSpatial];  // extents of o' and of j
  int32_t lower[kMaxSpatial], step[kMaxSpatial], offset[kMaxSpatial];  // input index = lower + o' * step + j * offset
  int32_t tap0 = 0, tap_step[kMaxSpatial];        // tap of the filter as it lies = tap0 + sum of j * tap_step
  int32_t f[kMaxSpatial];                         // output index = o' * phases + f
  int64_t rows(int64_t imgs) const { return imgs * outs[0] * outs[1] * outs[2]; }
  int32_t taps() const { return count[0] * count[1] * count[2]; }
};

// Forward and input gradient: the walk of phase (f0, f1, f2).
inline Sm90Walk sm90_walk(const Problem& p, bool flip, const int32_t* f) {
  Sm90Walk w;
  int32_t tap_unit = 1, all = 1;
  for (int i = kMaxSpatial - 1; i >= 0; --i) {
    const Axis& x = p.axis[i];
    const Phase ph = phase_of(x, f[i]);
    w.f[i] = f[i];
    w.outs[i] = (x.O - f[i] + x.phases - 1) / x.phases;
    w.count[i] = ph.count;
    w.step[i] = x.o_step;
    const bool down = x.j_step < 0;  // descending taps are walked backwards
    const int32_t last = ph.count > 0 ? ph.count - 1 : 0;
    w.lower[i] = ph.base + (down ? last * x.j_step : 0);
    w.offset[i] = down ? -x.j_step : x.j_step;
    w.tap_step[i] = (down ? -x.r_stride : x.r_stride) * tap_unit;
    w.tap0 += (ph.first + (down ? last * x.r_stride : 0)) * tap_unit;
    tap_unit *= x.R;
    all *= x.R;
  }
  if (flip) {
    w.tap0 = all - 1 - w.tap0;
    for (int32_t& s : w.tap_step) s = -s;
  }
  return w;
}

// Weight gradient: rows of the product are taps, the reduction walks over the pixels of dy.
inline Sm90Walk sm90_wgrad_walk(const Problem& p) {
  Sm90Walk w;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const Axis& x = p.axis[i];
    w.f[i] = 0, w.outs[i] = x.R, w.count[i] = x.O, w.lower[i] = x.c, w.step[i] = x.b, w.offset[i] = x.a, w.tap_step[i] = 0;
  }
  return w;
}

// What TMA can say of one axis (cuTensorMapEncodeIm2col).
inline int32_t sm90_upper(const Sm90Walk& w, int i, int32_t extent) {
  return (w.outs[i] - 1) * w.step[i] + w.lower[i] - (extent - 1);
}
inline bool sm90_fits_tma(const Sm90Walk& w, const Problem& p) {
  const bool volume = p.axis[0].I > 1 || p.axis[0].R > 1 || p.axis[0].O > 1;
  const int32_t corner = volume ? 16 : 128, reach = volume ? 31 : 255;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const int32_t upper = sm90_upper(w, i, p.axis[i].I), last = w.count[i] > 0 ? w.count[i] - 1 : 0;
    if (w.step[i] < 1 || w.step[i] > 8 || w.lower[i] < -corner || w.lower[i] >= corner || upper < -corner || upper >= corner ||
        int64_t{last} * w.offset[i] > reach)
      return false;
  }
  return true;
}

// Dense, channels innermost.
inline bool sm90_channels_last(int64_t channel, int64_t image, const int64_t* s, int64_t channels, int64_t images,
                               const int32_t* extent) {
  if (channel != 1) return false;
  int64_t want = channels;
  for (int i = kMaxSpatial - 1; i >= 0; --i) {
    if (extent[i] > 1 && s[i] != want) return false;
    want *= extent[i];
  }
  return images == 1 || image == want;
}
// HWIO, perhaps flipped in all spatial axes at once.
inline bool sm90_hwio(int64_t k_step, int64_t c_step, const int64_t* s, int64_t k, int64_t c, const int32_t* taps, bool* flip) {
  if (k_step != 1 || c_step != k) return false;
  int64_t want = c * k;
  int sign = 0;
  for (int i = kMaxSpatial - 1; i >= 0; --i) {
    if (taps[i] > 1) {
      const int here = s[i] == want ? 1 : s[i] == -want ? -1 : 0;
      if (here == 0 || (sign != 0 && here != sign)) return false;
      sign = here;
    }
    want *= taps[i];
  }
  *flip = sign < 0;
  return true;
}

// The taps j that meet the array for an output in o .. o + width - 1 of one axis (stride 1): *first and how many. Where none
// does, one, which reads zeros.
CONV_HD inline int32_t sm90_live_taps(int32_t lower, int32_t offset, int32_t count, int32_t extent, int32_t o, int32_t width,
                                          int32_t* first) {
  const int32_t low = lower + o, high = low + width - 1, room = extent - 1 - low;
  const int32_t from = high < 0 ? (offset - 1 - high) / offset : 0;
  int32_t to = room < 0 ? -1 : room / offset;
  to = to < count ? to : count - 1;
  *first = from <= to ? from : 0;
  return from <= to ? to - from + 1 : 1;
}
// Their sum over an axis cut into boxes. Boxes inside see every tap, and are counted, not visited.
inline int64_t sm90_sum_taps(const Sm90Walk& w, int axis, int32_t extent, int32_t width) {
  const int32_t lower = w.lower[axis], offset = w.offset[axis], count = w.count[axis], outs = w.outs[axis];
  // The last tap of output o is in the array for o <= full.
  const int64_t full = int64_t{extent} - 1 - lower - (int64_t{count} - 1) * offset;
  int64_t sum = 0;
  int32_t first;
  for (int32_t o = 0; o < outs; o += width) {
    if (count > 0 && lower + o + width > 0 && o <= full) {
      const int64_t end = full < outs - 1 ? full : outs - 1, boxes = (end - o) / width + 1;
      sum += boxes * count;
      o += static_cast<int32_t>((boxes - 1) * width);
    } else {
      sum += sm90_live_taps(lower, offset, count, extent, o, width, &first);
    }
  }
  return sum;
}
inline int64_t sm90_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// No activation, or one that only clips: v < lo ? lo : v > hi ? hi : v.
inline bool sm90_clip(int activation, float* lo, float* hi) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  *lo = activation == 0 ? -kInf : 0.f;
  *hi = activation == 2 ? 6.f : kInf;
  return activation >= 0 && activation <= 2;  // none, relu, relu6 (common/act.cuh)
}

inline Sm90Plan sm90_plan(const Problem& p) {
  Sm90Plan plan;
  const auto no = [&plan](const char* why) {
    plan.reason = why;
    return plan;
  };
  if (p.in_type == Type::kF32) return no("float32 operands");
  for (const void* data : {p.in_data, p.w_data, static_cast<const void*>(p.out_data), p.residual})
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return no("an address that is not a multiple of 16");
  if (p.out_type != p.in_type && !(p.op == Op::kWeightGrad && p.out_type == Type::kF32)) return no("the result has another type");
  if (p.batch != 1 || p.groups != 1) return no("groups or batched filters");
  int32_t in_extent[kMaxSpatial], out_extent[kMaxSpatial], mid_extent[kMaxSpatial];
  bool flat = true;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const Axis& x = p.axis[i];
    if (x.I < 1 || x.R < 1 || x.O < 1) return no("an empty sum");
    in_extent[i] = x.I, mid_extent[i] = x.R, out_extent[i] = x.O;
  }
  float lo, hi;
  if (!sm90_clip(p.activation, &lo, &hi)) return no("an activation that is not a clip");
  if (p.residual != nullptr && p.residual_type != p.out_type) return no("a residual of another type");
  int64_t rows, cols, steps = 1;  // of the product, in chunks of 64; of a tile's reduction
  int64_t in_channels, in_images;
  bool im2col = true, box = false;  // what the pixels can be loaded by
  if (p.op == Op::kWeightGrad) {
    in_channels = p.imgs, in_images = p.chs;
    if (in_images < 1 || in_channels % 8 != 0 || p.ks % 8 != 0) return no("channels are not multiples of 8");
    if (!sm90_channels_last(p.in.outer, p.in.channel, p.in.s, p.imgs, p.chs, in_extent) ||
        !sm90_channels_last(p.w.outer, p.w.channel, p.w.s, p.ks, p.chs, mid_extent))
      return no("images are not dense with channels last");
    if (!sm90_hwio(p.out.channel, p.out.outer, p.out.s, p.ks, p.imgs, out_extent, &plan.flip)) return no("filters are not HWIO");
    for (int i = 0; i < kMaxSpatial; ++i) {
      const Axis& x = p.axis[i];
      if (x.e != 1) return no("a dilated input");
      flat = flat && x.O == 1 && x.b == 1 && x.c == 0 && x.I == x.R;
    }
    if (!flat && !sm90_fits_tma(sm90_wgrad_walk(p), p)) return no("padding, stride or reach past TMA's limits");
    const int64_t pixels = p.chs * p.axis[0].R * p.axis[1].R * p.axis[2].R;
    if (pixels > kExtentLimit) return no("too many pixels");
    rows = p.pixels() * sm90_ceil(p.imgs, 64);
    cols = sm90_ceil(p.ks, 64);
  } else {
    in_channels = p.chs, in_images = p.imgs;
    if (in_channels < 1 || in_channels % 8 != 0 || p.ks % 8 != 0) return no("channels are not multiples of 8");
    if (!sm90_channels_last(p.in.channel, p.in.outer, p.in.s, p.chs, p.imgs, in_extent) ||
        !sm90_channels_last(p.out.channel, p.out.outer, p.out.s, p.ks, p.imgs, out_extent))
      return no("images are not dense with channels last");
    const bool forward = p.op == Op::kForward;
    if (!sm90_hwio(forward ? p.w.outer : p.w.channel, forward ? p.w.channel : p.w.outer, p.w.s, forward ? p.ks : p.chs,
                   forward ? p.chs : p.ks, mid_extent, &plan.flip))
      return no("filters are not HWIO");
    const int64_t phases = int64_t{p.axis[0].phases} * p.axis[1].phases * p.axis[2].phases;
    if (phases > kSm90Phases) return no("too many phases");
    for (int i = 0; i < kMaxSpatial; ++i) {
      const Axis& x = p.axis[i];
      if (x.phases > x.O) return no("more phases than outputs");
      flat = flat && x.R == 1 && x.o_step == 1 && x.c == 0 && x.I == x.O && x.phases == 1 && x.e == 1;
    }
    rows = 0;
    int32_t f[kMaxSpatial];
    bool step1 = true;
    for (f[0] = 0; f[0] < p.axis[0].phases; ++f[0])
      for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
        for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) {
          const Sm90Walk w = sm90_walk(p, plan.flip, f);
          if (phases == 1 && w.taps() == 0) return no("an empty sum");
          im2col = im2col && (flat || w.taps() == 0 || sm90_fits_tma(w, p));
          rows += sm90_ceil(w.rows(p.imgs), 64);
        }
    for (const Axis& x : p.axis) step1 = step1 && x.o_step == 1;
    box = !flat && step1 && p.axis[0].I == 1 && p.axis[0].R == 1 && p.axis[0].O == 1 && p.residual == nullptr;
    if (!im2col && !box) return no("padding, stride or reach past TMA's limits");
    if (p.imgs * p.pixels() > kExtentLimit) return no("too many pixels");
    cols = sm90_ceil(p.ks, 64);
    steps = sm90_ceil(p.taps() * sm90_ceil(p.chs, 64), phases);
    plan.strided = phases > 1;
    if (plan.strided && (p.bias != nullptr || p.residual != nullptr || p.activation != 0)) return no("an epilogue on phases");
  }
  const int64_t bytes = 2 * in_images * in_channels * in_extent[0] * in_extent[1] * in_extent[2];
  if (!flat && bytes < 131072) im2col = false;  // drivers up to 13.1 read im2col maps of small arrays wrongly
  if (!im2col && !box) return no("im2col maps of arrays under 128 KiB");
  plan.flat = flat;

  // The tile with the least cycles for the busiest multiprocessor. Measured on an H200: cycles of 64 steps of the reduction
  // (the power limit is in them: at full clocks a chunk of sums takes the tensor cores 128), and of the store that no
  // multiplication hides where the reduction is short (a result kept twice overlaps with the other consumer's).
  struct Tile {
    int mb, nb;
    bool swap;
    int64_t cycles, store;
  };
  constexpr Tile kConvTiles[] = {
      {2, 2, false, 650, 2600}, {3, 2, false, 1000, 4000}, {2, 3, false, 1020, 5000}, {2, 1, false, 455, 1500}, {1, 4, true, 710, 2700}};
  constexpr Tile kPhaseTiles[] = {{2, 2, false, 650, 3000}, {1, 4, true, 710, 3500}};
  // The weight gradient is shared evenly: per chunk of sums 128 (with columns of 192, 137), per chunk loaded from L2 140 to 150.
  constexpr Tile kWgradTiles[] = {
      {2, 4, false, 0, 0}, {2, 3, false, 0, 0}, {1, 4, false, 0, 0}, {1, 3, false, 0, 0}, {2, 4, true, 0, 0}, {1, 4, true, 0, 0}};
  // Boxes of many images at few pixels: taps that fall into the padding for all of them are left out.
  const auto phases = [&](const auto& visit) {
    int32_t f[kMaxSpatial] = {0, 0, 0};
    for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
      for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) {
        const Sm90Walk w = sm90_walk(p, plan.flip, f);
        if (w.taps() > 0) visit(w);
      }
  };
  int64_t all = 0, live1 = 0;
  if (box) {
    phases([&](const Sm90Walk& w) {
      all += int64_t{w.outs[1]} * w.count[1] * w.outs[2] * w.count[2];
      live1 += sm90_sum_taps(w, 1, p.axis[1].I, 1) * sm90_sum_taps(w, 2, p.axis[2].I, 1);
    });
  }
  const bool padded = plan.strided || live1 * 100 < all * 95;
  int64_t best = std::numeric_limits<int64_t>::max();
  const auto consider = [&](const Tile& t) {
    int64_t cost;
    if (p.op == Op::kWeightGrad) {
      const int64_t m = t.swap ? rows : cols, n = t.swap ? cols : rows, tiles_m = sm90_ceil(m, t.mb), tiles_n = sm90_ceil(n, t.nb);
      const int64_t multiply = tiles_m * tiles_n * t.mb * t.nb * (t.nb == 4 ? 128 : 137);
      const int64_t load_x = p.pixels() > 1 ? 150 : 140;  // of several taps, x is loaded by im2col
      const int64_t load = t.swap ? tiles_n * m * load_x + tiles_m * n * 145 : tiles_m * n * load_x + tiles_n * m * 145;
      cost = (multiply > load ? multiply : load) * 8 + multiply + load;
    } else {
      if (p.residual != nullptr && (t.swap || t.mb * t.nb > 4)) return;
      const int64_t tiles = sm90_ceil(rows, t.swap ? t.nb : t.mb) * sm90_ceil(cols, t.swap ? t.mb : t.nb);
      const int pixels = 64 * (t.swap ? t.nb : t.mb);
      if (box) {
        for (int pn = 256; pn >= 8 && (padded || !im2col); pn /= 2) {
          if (pixels % pn != 0 || (pn > 8 && pn / 2 >= p.imgs)) continue;
          const int rest = pixels / pn, ph = rest % 4 == 0 ? (rest >= 16 ? 4 : 2) : 1, pw = rest / ph;
          int64_t tiles_box = 0, live = 0;
          phases([&](const Sm90Walk& w) {
            tiles_box += sm90_ceil(w.outs[1], ph) * sm90_ceil(w.outs[2], pw);
            live += sm90_sum_taps(w, 1, p.axis[1].I, ph) * sm90_sum_taps(w, 2, p.axis[2].I, pw);
          });
          const int64_t others = sm90_ceil(p.imgs, pn) * sm90_ceil(cols, t.swap ? t.mb : t.nb);
          if (tiles_box == 0) continue;
          const int64_t mean = live * sm90_ceil(p.chs, 64) * t.cycles / tiles_box;
          tiles_box *= others;
          cost = sm90_ceil(tiles_box, kSm90Workers) * (mean > t.store ? mean : t.store) * 23 / 20;  // 15 % slower steps
          if (cost >= best) continue;
          best = cost, plan.mb = t.mb, plan.nb = t.nb, plan.swap = t.swap;
          plan.pw = pw, plan.ph = ph, plan.pn = pn;
        }
      }
      if (!im2col || (plan.strided && plan.pw > 0)) return;  // boxes of a phase are stored by TMA, lists row by row
      const int64_t multiply = steps * t.cycles;
      cost = sm90_ceil(tiles, kSm90Workers) * (multiply > t.store ? multiply : t.store);
    }
    if (cost < best) best = cost, plan.mb = t.mb, plan.nb = t.nb, plan.swap = t.swap, plan.pw = plan.ph = plan.pn = 0;
  };
  if (p.op == Op::kWeightGrad)
    for (const Tile& t : kWgradTiles) consider(t);
  else if (plan.strided)
    for (const Tile& t : kPhaseTiles) consider(t);
  else
    for (const Tile& t : kConvTiles) consider(t);
  if (plan.mb == 0) return no("no tile");
  plan.reason = nullptr;
  return plan;
}

}  // namespace conv
}  // namespace jaxprims
