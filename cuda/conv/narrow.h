// Which grouped convolutions with few channels a group the kernels of narrow.cuh take, and how they are cut up: no CUDA.
#pragma once
#include "conv/row_walk.h"

namespace jaxprims {
namespace conv {

constexpr int kNarrowChannels = 64;             // of a block: eight units of 8
constexpr int kNarrowPixel = 144;               // bytes of a pixel in shared memory: 128 and padding
constexpr int kNarrowPixels = 128;              // of a tile's row, at most
constexpr int kNarrowStages = 4;
constexpr int kNarrowGranules = 1792;          // of a row of a tile, at most
constexpr int kNarrowMost = 147 * 1024;         // bytes of shared memory beside their table
constexpr int kNarrowOut = kNarrowPixels * kNarrowPixel;

struct NarrowPlan : RowWalk {
  int32_t depth = 8;                            // input channels that a unit of 8 output channels meets
  int32_t stage = 0, shared = 0;
};

inline NarrowPlan narrow_plan(const Problem& p, int64_t multiprocessors = 132) {
  NarrowPlan d;
  static_cast<RowWalk&>(d) = row_walk(p);
  if (d.reason != nullptr) return d;
  if (p.chs != p.ks || (p.chs != 2 && p.chs != 4 && p.chs != 8 && p.chs != 16)) {
    d.reason = "not 2, 4, 8 or 16 channels a group";
    return d;
  }
  if (p.in.channel != 1 || p.out.channel != 1 || p.in.g != p.chs || p.out.g != p.ks) { d.reason = "channels are not contiguous"; return d; }
  if (d.R != 3 || d.S != 3) { d.reason = "a filter other than 3 x 3"; return d; }
  d.depth = p.chs == 16 ? 16 : 8;
  const int32_t OW = walk_columns(d);
  d.cols = OW < kNarrowPixels ? OW : kNarrowPixels;
  int64_t images = kNarrowPixels / d.cols;
  if (images > p.imgs) images = p.imgs;
  const int64_t tiles = (p.imgs + images - 1) / images;
  d.images = static_cast<int32_t>((p.imgs + tiles - 1) / tiles);  // tiles alike
  d.window = d.cols + d.S - 1;
  d.stage = d.images * d.window * kNarrowPixel;
  d.shared = kNarrowStages * d.stage + 2 * kNarrowOut;
  if (d.shared > kNarrowMost) {  // images of a column or two
    d.images = (kNarrowMost - 2 * kNarrowOut) / (kNarrowStages * d.window * kNarrowPixel);
    d.stage = d.images * d.window * kNarrowPixel;
    d.shared = kNarrowStages * d.stage + 2 * kNarrowOut;
  }
  walk_blocks(p, kNarrowChannels, multiprocessors, &d);
  return d;
}

}  // namespace conv
}  // namespace jaxprims
