// Which depthwise convolutions the kernels of band.cuh take, and how they are cut up: a pure function, no CUDA.
#pragma once
#include "conv/row_walk.h"

namespace jaxprims {
namespace conv {

constexpr int kBandChannels = 32;               // of a block
constexpr int kBandColumn = 80;                 // bytes of a column in shared memory: 64 and padding
constexpr int kBandGroup = 8 * kBandColumn + 16;  // of eight columns
constexpr int kBandStages = 6;
constexpr int kBandMost = 147 * 1024;            // bytes of shared memory beside the static ones
constexpr int kBandOut = 16 * kBandGroup;       // of an output row of a tile

struct BandPlan : RowWalk {
  int32_t segments_log = 0;   // spans of 8 columns in a tile
  int32_t pitch = 0;          // bytes of an image's row in a stage
  int32_t stage = 0, shared = 0;
};

inline BandPlan band_plan(const Problem& p, int64_t multiprocessors = 132) {
  BandPlan d;
  static_cast<RowWalk&>(d) = row_walk(p);
  if (d.reason != nullptr) return d;
  if (p.chs != 1 || p.ks != 1 || p.in.g != 1 || p.out.g != 1) { d.reason = "more than one channel per group"; return d; }
  // Below, the FMA kernel takes as long or less: 3 x 3 on (64, 56, 56, 192) 115 against 135 us, four taps in a line 162 against 272 us.
  if (d.R > 7 || d.S > 9 || d.R < 4 || d.R * d.S < 20) { d.reason = "a filter other than 5 x 5 to 7 x 9"; return d; }
  while ((8 << d.segments_log) < walk_columns(d) && d.segments_log < 4) ++d.segments_log;
  const int segments = 1 << d.segments_log;
  d.images = 16 >> d.segments_log, d.cols = 8 * segments;
  d.window = 8 * (segments + 1);
  d.pitch = (segments + 1) * kBandGroup;        // an odd number of 16 bytes where one image is one segment: 2 x 41 + 1
  if (d.pitch / 16 % 2 == 0) d.pitch += 16;
  d.stage = d.images * d.pitch;
  d.shared = kBandStages * d.stage + 2 * kBandOut;  // at most 146 KB
  walk_blocks(p, kBandChannels, multiprocessors, &d);
  return d;
}

}  // namespace conv
}  // namespace jaxprims
