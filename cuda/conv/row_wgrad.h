// Which weight gradients the kernels of row_wgrad.cuh take (depthwise, and groups of few channels), and how they are cut up: no CUDA.
#pragma once
#include "conv/band.h"
#include "conv/narrow.h"

namespace jaxprims {
namespace conv {

constexpr int kPairStages = 4;       // of an input row and an output row
constexpr int kPairPixels = 112;     // of a row, narrow: three such rows and their windows would not fit with 128
constexpr int kPairShared = 140 * 1024;
constexpr int kPairGranulesX = 1536, kPairGranulesY = 1024;  // of a row of a tile, at most

struct RowWgradPlan : RowWalk {
  bool band = false;                 // depthwise; else groups of 2 to 16 channels
  int32_t segments_log = 0;          // band: spans of 8 columns in a tile
  int32_t depth = 8;                 // narrow: input channels that a unit of 8 output channels meets
  int32_t pitch_x = 0, pitch_y = 0;  // bytes of an image's row in a stage
  int32_t y_at = 0, stage = 0, shared = 0;
};

inline RowWgradPlan row_wgrad_plan(const Problem& p, int64_t workspace, int64_t multiprocessors = 132) {
  RowWgradPlan d;
  if (p.op != Op::kWeightGrad) { d.reason = "not a weight gradient"; return d; }
  if (p.in_type == Type::kF32) { d.reason = "not 16-bit elements"; return d; }
  if (p.batch != 1 || p.groups < 2) { d.reason = "a true batch or one group"; return d; }
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  if (p.empty() || p.taps() == 0 || p.chs == 0) { d.reason = "empty"; return d; }
  if (a0.O != 1 || a0.R != 1 || a0.I != 1 || a0.c != 0) { d.reason = "three spatial axes"; return d; }
  for (const Axis* a : {&a1, &a2})
    if (a->a < 1 || a->e != 1 || a->b != 1) { d.reason = "a stride"; return d; }
  // x: in.channel = image, in.outer = channel of the group; dy: w.channel = image, w.outer = channel of the group.
  const TensorStrides &x = p.in, &y = p.w;
  const int64_t per = p.imgs, C = p.groups * per;
  if (per != p.ks || (per > 1 && (x.outer != 1 || y.outer != 1)) || x.g != per || y.g != per || x.offset != 0 || y.offset != 0) {
    d.reason = "channels are not contiguous";
    return d;
  }
  if (C % 8 != 0) { d.reason = "channels are not a multiple of 8"; return d; }
  for (const int64_t s : {x.channel, x.s[1], x.s[2], y.channel, y.s[1], y.s[2]})
    if (s % 8 != 0 || s < 0 || 32 * s >= kWalkReach) { d.reason = "a pixel's channels do not start on 16 bytes"; return d; }
  if (reinterpret_cast<uintptr_t>(p.in_data) % 16 != 0 || reinterpret_cast<uintptr_t>(p.w_data) % 16 != 0) {
    d.reason = "an array does not start on 16 bytes";
    return d;
  }
  d.R = a1.O, d.S = a2.O, d.base_h = a1.c, d.base_w = a2.c, d.dil_h = a1.a, d.dil_w = a2.a;
  d.OH = a1.R, d.OW = a2.R, d.IH = a1.I, d.IW = a2.I;
  walk_pieces(&d);
  const int32_t OW = walk_columns(d);
  d.band = per == 1;
  if (d.band) {
    if (d.R > 7 || d.S > 9 || d.R < 3 || d.R * d.S < 9) { d.reason = "a filter other than 3 x 3 to 7 x 9"; return d; }
    // Measured: 3 x 3 with a dilation of 4 147 us against 112 of the FMA kernel, which is 109 against 82 without a dilation.
    if (d.R * d.S < 20 && (d.dil_h > 1 || d.dil_w > 1)) { d.reason = "a small filter with a dilation"; return d; }
    while ((8 << d.segments_log) < OW && d.segments_log < 4) ++d.segments_log;
    const int segments = 1 << d.segments_log;
    d.images = 16 >> d.segments_log, d.cols = 8 * segments, d.window = 8 * (segments + 1);
    d.pitch_x = (segments + 1) * kBandGroup, d.pitch_y = segments * kBandGroup;
    if (d.pitch_x / 16 % 2 == 0) d.pitch_x += 16;
    if (d.pitch_y / 16 % 2 == 0) d.pitch_y += 16;
  } else {
    if (per != 2 && per != 4 && per != 8 && per != 16) { d.reason = "not 2, 4, 8 or 16 channels a group"; return d; }
    if (d.R != 3 || d.S != 3) { d.reason = "a filter other than 3 x 3"; return d; }
    d.depth = per == 16 ? 16 : 8;
    d.cols = OW < kPairPixels ? OW : kPairPixels;
    d.window = d.cols + d.S - 1;
    int64_t images = kNarrowPixels / d.cols;
    const int64_t room = (kPairShared - 1024) / kPairStages / ((d.window + d.cols) * kNarrowPixel);
    if (images > room) images = room;
    if (images > p.chs) images = p.chs;
    const int64_t tiles = (p.chs + images - 1) / images;
    d.images = static_cast<int32_t>((p.chs + tiles - 1) / tiles);
    d.pitch_x = d.window * kNarrowPixel, d.pitch_y = d.cols * kNarrowPixel;
  }
  d.y_at = d.images * d.pitch_x;
  d.stage = d.y_at + d.images * d.pitch_y;
  d.shared = kPairStages * d.stage + 512;
  if (d.shared < 40 * 1024) d.shared = 40 * 1024;  // the sums of half a block
  const int64_t chunk = d.band ? kBandChannels : kNarrowChannels;
  const int64_t each = 4 * p.pixels() * per * C, room = workspace / each;
  if (room < 1) { d.reason = "no workspace"; return d; }
  d.reason = nullptr;
  walk_blocks(p, chunk, multiprocessors * (d.band && d.R <= 3 && d.shared <= 112 * 1024 ? 2 : 1), &d);
  int64_t blocks = d.per_chunk;
  if (blocks > room) blocks = room;
  if (blocks > (d.rows + 3) / 4) blocks = (d.rows + 3) / 4;
  d.per_chunk = static_cast<int32_t>(blocks);
  return d;
}

}  // namespace conv
}  // namespace jaxprims
