// Which depthwise convolutions with a large filter the kernel of wide.cuh takes, and how they are cut up: a pure function, no CUDA.
#pragma once
#include "conv/row_walk.h"

namespace jaxprims {
namespace conv {

constexpr int kWideChannels = 16;                // of a block
constexpr int kWideImages = 16;                  // of a tile: the rows of the matrix product
constexpr int kWideCols = 32;                    // output columns of a tile
constexpr int kWideRows = 4;                     // output rows of a tile
constexpr int kWideSteps = 4;                    // of 16 input columns: 32 + 31 - 1 columns are at most 64
constexpr int kWideStages = 3;
constexpr int kWideTaps = 31;                    // along an axis, at most
constexpr int kWideTable = 48;                   // words of a channel's tap row: neighbouring pairs of taps from -7 to 39
constexpr int kWidePitch = 64 * 32 + 16;         // bytes of an image's row in a stage: neighbouring images in different banks
constexpr int kWideStage = kWideImages * kWidePitch;
constexpr int kWideOut = kWideImages * kWideCols * 48;  // bytes of an output row: 32 of a pixel, and padding
constexpr int kWideMost = 227 * 1024;            // Hopper's shared memory

struct WidePlan : RowWalk {
  int32_t tiles_h = 1;
  int64_t tiles = 0;                             // of a chunk of channels
  int32_t shared = 0;
};

inline WidePlan wide_plan(const Problem& p) {
  WidePlan d;
  static_cast<RowWalk&>(d) = row_walk(p);
  if (d.reason != nullptr) return d;
  if (p.chs != 1 || p.ks != 1 || p.in.g != 1 || p.out.g != 1) { d.reason = "more than one channel per group"; return d; }
  if (d.R > kWideTaps || d.S > kWideTaps || d.R * d.S < 64) { d.reason = "a filter other than 8 x 8 to 31 x 31"; return d; }
  if (d.dil_h != 1 || d.dil_w != 1) { d.reason = "a dilation"; return d; }
  if (p.imgs < kWideImages / 2) { d.reason = "fewer than 8 images"; return d; }
  d.images = kWideImages, d.cols = kWideCols;
  d.tiles_w = (p.axis[2].O + kWideCols - 1) / kWideCols, d.tiles_h = (p.axis[1].O + kWideRows - 1) / kWideRows;
  d.chunks = static_cast<int32_t>((p.groups + kWideChannels - 1) / kWideChannels);
  d.tiles = (p.imgs + kWideImages - 1) / kWideImages * d.tiles_w * d.tiles_h;
  d.shared = kWideStages * kWideStage + kWideOut + d.R * kWideChannels * kWideTable * 4;
  if (d.shared > kWideMost) { d.reason = "the filter does not fit in shared memory"; return d; }
  if (d.tiles * d.chunks >= kWalkReach) { d.reason = "more than 2^31 tiles"; return d; }
  return d;
}

}  // namespace conv
}  // namespace jaxprims
