// Which kernel takes a grouped convolution, before the general ones are asked: a pure function, no CUDA.
//   band       depthwise 16-bit filters of 5 x 5 to 7 x 9 on tensor cores     wide     up to 31 x 31
//   narrow     2 to 16 channels a group, 3 x 3, 16-bit                  wgrad    the weight gradients of band and narrow
//   depthwise  the rest of one channel a group: float32, strides, dilations, 1-D and 3-D
#pragma once
#include "conv/band.h"
#include "conv/depthwise.h"
#include "conv/narrow.h"
#include "conv/row_wgrad.h"
#include "conv/wide.h"

namespace jaxprims {
namespace conv {

enum class Grouped : int { kNone, kBand, kWide, kNarrow, kRowWgrad, kDepthwise };

struct GroupedPlan {
  Grouped kernel = Grouped::kNone;
  BandPlan band;
  WidePlan wide;
  NarrowPlan narrow;
  RowWgradPlan wgrad;
  DwPlan depthwise;
};

// workspace: bytes that the call was given. large: a block may have Hopper's 227 KB of shared memory.
inline GroupedPlan grouped_plan(const Problem& p, int64_t workspace = 0, bool large = true) {
  GroupedPlan d;
  if (p.groups < 2) return d;
  if (p.op == Op::kWeightGrad) {
    d.wgrad = row_wgrad_plan(p, workspace);
    if (d.wgrad.reason == nullptr) { d.kernel = Grouped::kRowWgrad; return d; }
  } else {
    d.band = band_plan(p);
    if (d.band.reason == nullptr) { d.kernel = Grouped::kBand; return d; }
    if (large) d.wide = wide_plan(p);
    if (d.wide.reason == nullptr) { d.kernel = Grouped::kWide; return d; }
    d.narrow = narrow_plan(p);
    if (d.narrow.reason == nullptr) { d.kernel = Grouped::kNarrow; return d; }
  }
  d.depthwise = depthwise_plan(p, workspace);
  if (d.depthwise.reason == nullptr) d.kernel = Grouped::kDepthwise;
  return d;
}

}  // namespace conv
}  // namespace jaxprims
