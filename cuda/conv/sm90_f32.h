// Which float32 convolutions Hopper's tensor cores take, forward and input gradient, with which tile: plain C++.
//
// Taken: float32, channels last (x, y) and HWIO (w) dense, no groups, no true batch axis (batched filters), C and K multiples of 4.
// Walks over taps are those of sm90.h; a chunk of 32 channels by 64 of another axis is 8 KiB.
#pragma once
#include <cstdint>
#include <limits>

#include "conv/problem.h"
#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

// Rows of a tile's product are channels of the result: 64 cb of them; columns are pixels: n for each of the two warpgroups, which
// share the pixels and halve the channels (cb = 2) or share the channels and halve the pixels (cb = 1).
struct Sm90F32Plan {
  const char* reason = "not looked at";  // null where the kernels take the problem
  int cb = 0, n = 0;
  bool exact = false;          // float32 as three products of TF32; else operands are rounded to TF32
  bool flat = false;           // 1 x 1, stride 1, no padding: the pixels are one list, no im2col
  bool strided = false;        // phases
  bool flip = false;           // the filter lies reversed
  int pw = 0, ph = 0, pn = 0;  // a tile's pixels are a box of so many columns, rows, images; 0: a list, by im2col
  int pixels() const { return cb == 2 ? n : 2 * n; }
};

inline Sm90F32Plan sm90_f32_plan(const Problem& p) {
  Sm90F32Plan plan;
  const auto no = [&plan](const char* why) {
    plan.reason = why;
    return plan;
  };
  if (p.in_type != Type::kF32 || p.out_type != Type::kF32) return no("operands or a result that are not float32");
  if (p.op == Op::kWeightGrad) return no("a weight gradient: both operands would lie the wrong way");
  for (const void* data : {p.in_data, p.w_data, static_cast<const void*>(p.out_data), p.residual})
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return no("an address that is not a multiple of 16");
  if (p.batch != 1 || p.groups != 1) return no("groups or a true batch axis");
  int32_t in_extent[kMaxSpatial], out_extent[kMaxSpatial], taps[kMaxSpatial];
  bool flat = true;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const Axis& x = p.axis[i];
    if (x.I < 1 || x.R < 1 || x.O < 1) return no("an empty sum");
    if (x.phases > x.O) return no("more phases than outputs");
    in_extent[i] = x.I, taps[i] = x.R, out_extent[i] = x.O;
    flat = flat && x.R == 1 && x.o_step == 1 && x.c == 0 && x.I == x.O && x.phases == 1 && x.e == 1;
  }
  float lo, hi;
  if (!sm90_clip(p.activation, &lo, &hi)) return no("an activation that is not a clip");
  if (p.residual != nullptr && p.residual_type != Type::kF32) return no("a residual of another type");
  if (p.chs < 1 || p.chs % 4 != 0 || p.ks % 4 != 0) return no("channels are not multiples of 4");
  const int64_t chunks = sm90_ceil(p.chs, 32);
  if (p.chs * p.ks * 4 < chunks * 32 * sm90_ceil(p.ks, 64) * 64) return no("so few channels that three quarters of a tile are empty");
  if (!sm90_channels_last(p.in.channel, p.in.outer, p.in.s, p.chs, p.imgs, in_extent) ||
      !sm90_channels_last(p.out.channel, p.out.outer, p.out.s, p.ks, p.imgs, out_extent))
    return no("images are not dense with channels last");
  const bool forward = p.op == Op::kForward;
  if (!sm90_hwio(forward ? p.w.outer : p.w.channel, forward ? p.w.channel : p.w.outer, p.w.s, forward ? p.ks : p.chs,
                 forward ? p.chs : p.ks, taps, &plan.flip))
    return no("filters are not HWIO");
  const int64_t phases = int64_t{p.axis[0].phases} * p.axis[1].phases * p.axis[2].phases;
  if (phases > kSm90Phases) return no("too many phases");
  if (p.imgs * p.pixels() > kExtentLimit) return no("too many pixels");
  const auto visit = [&](const auto& use) {
    int32_t f[kMaxSpatial];
    for (f[0] = 0; f[0] < p.axis[0].phases; ++f[0])
      for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
        for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) use(sm90_walk(p, plan.flip, f));
  };
  bool im2col = true, step1 = true, some = false;
  visit([&](const Sm90Walk& w) {
    some = some || w.taps() > 0;
    im2col = im2col && (flat || w.taps() == 0 || sm90_fits_tma(w, p));
  });
  if (!some) return no("an empty sum");
  for (const Axis& x : p.axis) step1 = step1 && x.o_step == 1;
  const bool box = !flat && step1 && p.axis[0].I == 1 && p.axis[0].R == 1 && p.axis[0].O == 1;
  if (!im2col && !box) return no("padding, stride or reach past TMA's limits");
  const int64_t bytes = 4 * p.imgs * p.chs * in_extent[0] * in_extent[1] * in_extent[2];
  if (!flat && bytes < 131072) im2col = false;  // drivers up to 13.1 read im2col maps of small arrays wrongly
  if (!im2col && !box) return no("im2col maps of arrays under 128 KiB");
  plan.flat = flat, plan.strided = phases > 1, plan.exact = !p.tf32;

  // The tile with the least cycles for the busiest multiprocessor: of a step of 32 channels, and of storing.
  struct Tile {
    int cb, n, cycles, store;
  };
  constexpr Tile kTf32[] = {{2, 256, 1060, 9000}, {2, 192, 850, 7000}, {2, 128, 690, 5000}, {1, 128, 720, 5000}};
  constexpr Tile kExact[] = {{2, 128, 2150, 5000}, {1, 128, 2800, 5000}};
  int64_t best = std::numeric_limits<int64_t>::max();
  // Boxes of many images at few pixels: taps that fall into the padding for all of them are left out.
  int64_t all = 0, live1 = 0;
  if (box)
    visit([&](const Sm90Walk& w) {
      if (w.taps() == 0) return;
      all += int64_t{w.outs[1]} * w.count[1] * w.outs[2] * w.count[2];
      live1 += sm90_sum_taps(w, 1, p.axis[1].I, 1) * sm90_sum_taps(w, 2, p.axis[2].I, 1);
    });
  const bool padded = live1 * 100 < all * 95;
  const auto consider = [&](const Tile& t) {
    if (plan.strided && t.n > 128) return;
    const int64_t columns = sm90_ceil(p.ks, 64 * t.cb);
    const int pixels = t.cb == 2 ? t.n : 2 * t.n;
    const auto take = [&](int64_t tiles, int64_t steps, int pw, int ph, int pn) {  // steps: all tiles' together
      const int64_t waves = sm90_ceil(tiles, kSm90Workers);
      const int64_t cost = waves * (steps * t.cycles / tiles + t.store) * (pw > 0 ? 23 : 20) / 20;
      if (cost >= best) return;
      best = cost, plan.cb = t.cb, plan.n = t.n, plan.pw = pw, plan.ph = ph, plan.pn = pn;
    };
    if (im2col) {
      int64_t tiles = 0, steps = 0;
      visit([&](const Sm90Walk& w) {
        const int64_t m = sm90_ceil(w.rows(p.imgs), pixels);
        tiles += m, steps += m * w.taps();
      });
      take(tiles * columns, steps * columns * chunks, 0, 0, 0);
    }
    for (int pn = 256; pn >= 8 && box && (padded || !im2col); pn /= 2) {
      if (pixels % pn != 0 || (pn > 8 && pn / 2 >= p.imgs)) continue;
      const int rest = pixels / pn, ph = rest % 4 == 0 ? (rest >= 16 ? 4 : 2) : 1, pw = rest / ph;
      int64_t tiles = 0, live = 0;
      visit([&](const Sm90Walk& w) {
        if (w.taps() == 0) {
          tiles += sm90_ceil(w.rows(p.imgs), pixels);
          return;
        }
        tiles += sm90_ceil(w.outs[1], ph) * sm90_ceil(w.outs[2], pw) * sm90_ceil(p.imgs, pn);
        live += sm90_sum_taps(w, 1, p.axis[1].I, ph) * sm90_sum_taps(w, 2, p.axis[2].I, pw) * sm90_ceil(p.imgs, pn);
      });
      take(tiles * columns, live * columns * chunks, pw, ph, pn);
    }
  };
  if (plan.exact)
    for (const Tile& t : kExact) consider(t);
  else
    for (const Tile& t : kTf32) consider(t);
  if (plan.cb == 0) return no("no tile");
  plan.reason = nullptr;
  return plan;
}

}  // namespace conv
}  // namespace jaxprims
