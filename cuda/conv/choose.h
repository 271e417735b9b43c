// Which family of kernels a convolution goes to, and with which plan: a pure function of the problem, no CUDA, no timing.
#pragma once
#include <string>

#include "conv/depthwise.h"
#include "conv/im2col.h"
#include "conv/select.h"
#include "conv/sm90_f32.h"

namespace jaxprims {
namespace conv {

enum class Route : int {
  kDepthwise = 0,  // depthwise.cuh
  kSm90 = 1,       // sm90_conv.cuh, sm90_wgrad.cuh
  kGeneral = 2,    // implicit_gemm.cuh, direct.cuh
  kIm2col = 3,     // im2col.cu
  kSm90F32 = 4,    // sm90_f32.cuh
};

struct Choice {
  Route route = Route::kGeneral;
  DwPlan depthwise;
  Im2colPlan im2col;
  Sm90F32Plan sm90_f32;
  Config config;  // kSm90, kGeneral
};

// sm90: whether a GPU is there that runs the Hopper kernels. Where the algorithm that is asked for cannot be, another is taken:
// jaxprims/conv/checks.py has refused what a caller can know.
inline Choice choose(const Problem& p, bool sm90, int64_t workspace) {
  Choice c;
  if (p.algorithm == Algorithm::kGemm) {
    c.im2col = im2col_plan(p, workspace);
    if (c.im2col.reason == nullptr) {
      c.route = Route::kIm2col;
      return c;
    }
  }
  if (p.groups > 1 && p.algorithm != Algorithm::kImplicitGemm) {
    c.depthwise = depthwise_plan(p, workspace);
    if (c.depthwise.reason == nullptr) {
      c.route = Route::kDepthwise;
      return c;
    }
  }
  if (sm90 && p.in_type == Type::kF32 && p.algorithm != Algorithm::kDirect) {
    c.sm90_f32 = sm90_f32_plan(p);
    if (c.sm90_f32.reason == nullptr) {
      c.route = Route::kSm90F32;
      return c;
    }
  }
  c.config = select(p, sm90 && p.in_type != Type::kF32 && p.algorithm != Algorithm::kDirect, workspace);
  c.route = c.config.kernel == Kernel::kSm90 ? Route::kSm90 : Route::kGeneral;
  return c;
}

// The choice in words, as jaxprims.explain prints it.
inline std::string describe(const Choice& c) {
  const auto tile = [](int m, int n) { return std::to_string(m) + "x" + std::to_string(n); };
  switch (c.route) {
    case Route::kIm2col: return "im2col, " + std::to_string(c.im2col.images) + " images a round";
    case Route::kDepthwise: return "depthwise";
    case Route::kSm90: return "wgmma " + tile(64 * c.config.sm90.mb, 64 * c.config.sm90.nb);
    case Route::kSm90F32:
      return "wgmma " + tile(c.sm90_f32.pixels(), 64 * c.sm90_f32.cb) + (c.sm90_f32.exact ? ", three products of TF32" : ", TF32");
    case Route::kGeneral: break;
  }
  const std::string splits = c.config.splits > 1 ? ", " + std::to_string(c.config.splits) + " splits" : "";
  if (c.config.kernel == Kernel::kDirect) return "direct" + splits;
  const Tile t = tile_of(c.config.kernel);
  return "FMA " + tile(t.m, t.n) + splits;
}

}  // namespace conv
}  // namespace jaxprims
