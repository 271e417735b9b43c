// Convolution through an explicit matrix of patches (im2col), the route of Caffe: kept to be measured against, never chosen.
//
// Patches of as many images as the workspace holds are written out, rows (image, o..), columns (r.., channel); the product with
// the filters, which lie as that matrix in HWIO, is a 1 x 1 convolution of them, by whatever kernel that gets. Then the next
// images. Taken: forward, channels last, HWIO not reversed, dense, no groups, no batched filters.
#pragma once
#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

inline int64_t bytes_of(Type t) { return t == Type::kF32 ? 4 : 2; }

struct Im2colPlan {
  const char* reason = "not looked at";  // null where it is taken
  int64_t images = 0;                    // of a round
};

// workspace: bytes. jaxprims/conv/workspace.py asks for as much as all images take, up to its limit.
inline Im2colPlan im2col_plan(const Problem& p, int64_t workspace) {
  Im2colPlan plan;
  const auto no = [&plan](const char* why) {
    plan.reason = why;
    return plan;
  };
  if (p.op != Op::kForward) return no("not a forward convolution");
  if (p.batch != 1 || p.groups != 1) return no("groups or batched filters");
  int32_t in_extent[kMaxSpatial], out_extent[kMaxSpatial], taps[kMaxSpatial];
  for (int i = 0; i < kMaxSpatial; ++i) in_extent[i] = p.axis[i].I, out_extent[i] = p.axis[i].O, taps[i] = p.axis[i].R;
  bool flip = false;
  if (!sm90_channels_last(p.in.channel, p.in.outer, p.in.s, p.chs, p.imgs, in_extent) ||
      !sm90_channels_last(p.out.channel, p.out.outer, p.out.s, p.ks, p.imgs, out_extent) ||
      !sm90_hwio(p.w.outer, p.w.channel, p.w.s, p.ks, p.chs, taps, &flip) || flip)
    return no("not channels last with HWIO filters");
  const int64_t columns = p.chs * p.taps();
  if (columns < 1 || columns > kExtentLimit) return no("an empty sum, or one too long");
  constexpr int64_t kRound = int64_t{1} << 30;  // bytes, so that an index of a round has 32 bits
  plan.images = (workspace < kRound ? workspace : kRound) / bytes_of(p.in_type) / columns / p.pixels();
  if (plan.images < 1) return no("the workspace holds no image");
  if (plan.images > p.imgs) plan.images = p.imgs;
  plan.reason = nullptr;
  return plan;
}

// The product of one round: images first .. first + count - 1, patches at `patches`.
inline Problem im2col_product(const Problem& p, const void* patches, int64_t first, int64_t count) {
  Problem q = p;
  q.algorithm = Algorithm::kImplicitGemm;
  q.imgs = count;
  q.chs = p.chs * p.taps();
  q.in_data = patches;
  q.in = TensorStrides{};
  q.in.channel = 1;
  int64_t step = q.chs;
  for (int i = kMaxSpatial - 1; i >= 0; --i) {
    const int32_t O = p.axis[i].O;
    q.axis[i] = make_axis(1, 1, 0, 1, O, 1, O);
    q.in.s[i] = step;
    step *= O;
    q.w.s[i] = q.chs * p.ks;
  }
  q.in.outer = step;
  q.out_data = static_cast<char*>(p.out_data) + first * p.out.outer * bytes_of(p.out_type);
  if (p.residual != nullptr) q.residual = static_cast<const char*>(p.residual) + first * p.out.outer * bytes_of(p.residual_type);
  return q;
}

}  // namespace conv
}  // namespace jaxprims
