// Which kernel and which order of walking a convolution gets: a pure function, no CUDA, no timing.
#pragma once
#include <cstdint>
#include <limits>

#include "conv/problem.h"
#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

enum class Kernel : int {
  kWide = 0,    // 128 rows x 64 channels per block
  kMedium = 1,  // 64 x 64
  kSplit = 2,   // 32 x 32, the reduction shared by eight groups of threads
  kTiny = 3,    // 16 x 16, the reduction shared by sixteen
  kNarrow = 4,  // 128 x 8
  kDirect = 5,  // no tiles: one thread, or a few, per output
  kSm90 = 6,    // Hopper's tensor cores; sm90.h has the tile
};

struct Config {
  Kernel kernel = Kernel::kMedium;
  // Which index neighbouring threads take, so that their loads are neighbours in memory.
  bool m_img_fast = false;  // rows (img, o..): img innermost, else o
  bool k_ch_fast = true;    // reduction (ch, r..): ch innermost, else r
  bool a_k_fast = true;     // threads load `in` along the reduction, else along the rows
  bool b_k_fast = false;    // threads load `w` along the reduction, else along the output channels
  bool out_k_fast = true;   // threads store along the output channels, else along the rows
  int lanes = 256;          // direct: outputs per block; 256 / lanes threads share one output's reduction
  int splits = 1;           // weight gradient: blocks that share one tile's reduction; their sums meet in the workspace
  Sm90Plan sm90;            // kSm90: the tile; else why not
};

struct Tile {
  int m, n;
};
constexpr Tile tile_of(Kernel k) {
  switch (k) {
    case Kernel::kWide: return {128, 64};
    case Kernel::kMedium: return {64, 64};
    case Kernel::kSplit: return {32, 32};
    case Kernel::kTiny: return {16, 16};
    default: return {128, 8};
  }
}

constexpr int tile_sharing(Kernel k) {  // groups of threads that share a block's reduction
  switch (k) {
    case Kernel::kSplit: return 8;
    case Kernel::kTiny: return 16;
    case Kernel::kNarrow: return 4;
    default: return 1;
  }
}

inline int64_t tile_blocks(const Problem& p, Kernel k) {
  const Tile t = tile_of(k);
  const int64_t m = p.imgs * p.phase_pixels();
  return (m + t.m - 1) / t.m * ((p.ks + t.n - 1) / t.n) * p.phases() * p.groups * p.batch;
}

constexpr int64_t kSMs = 132;         // of an H200; fewer blocks than this leave multiprocessors idle
constexpr int64_t kSerial = 8192;     // terms that one float32 accumulator should take
constexpr int64_t kSplitTerms = 256;  // a split of fewer costs more than it saves

// Splits that the workspace and the length of the reduction allow.
inline int64_t most_splits(const Problem& p, int64_t workspace) {
  if (p.op != Op::kWeightGrad || p.empty()) return 1;
  const int64_t room = workspace / 4 / (p.batch * p.groups * p.imgs * p.ks * p.pixels()), useful = p.chs * p.taps() / kSplitTerms;
  const int64_t most = room < useful ? room : useful;
  return most < 1 ? 1 : most > (1 << 16) ? 1 << 16 : most;
}
// The splits of a kernel of so many blocks, whose blocks each hold `sharing` accumulators of one sum: enough that no accumulator
// takes too many terms and two blocks run on each multiprocessor, a few more where that leaves the last round fuller.
inline int best_splits(const Problem& p, int64_t blocks, int64_t sharing, int64_t most) {
  constexpr int64_t kRound = 2 * kSMs;
  const int64_t accurate = (p.chs * p.taps() + sharing * kSerial - 1) / (sharing * kSerial), fill = kRound / blocks;
  int64_t best = accurate > fill ? accurate : fill;
  best = best < 1 ? 1 : best > most ? most : best;
  const auto share = [&](int64_t splits) {  // of the multiprocessors' time that is used
    const int64_t n = blocks * splits;
    return static_cast<double>(n) / static_cast<double>((n + kRound - 1) / kRound * kRound);
  };
  const int64_t least = best;
  for (int64_t s = least + 1; s <= most && s <= least + 4; ++s)
    if (share(s) > 1.1 * share(best)) best = s;
  return static_cast<int>(best);
}

// An axis of extent 1 is never the contiguous one.
inline int64_t step(int64_t stride, int64_t extent) {
  return extent <= 1 ? std::numeric_limits<int64_t>::max() : stride < 0 ? -stride : stride;
}
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// sm90: whether a GPU is there that runs the Hopper kernels. workspace: bytes that the call was given.
inline Config select(const Problem& p, bool sm90 = false, int64_t workspace = 0) {
  Config c;
  if (sm90) {
    c.sm90 = sm90_plan(p);
    if (c.sm90.reason == nullptr && (p.op != Op::kWeightGrad || workspace >= kSm90Workspace)) {
      c.kernel = Kernel::kSm90;
      return c;
    }
  }
  int64_t in_s = step(0, 1), w_s = step(0, 1), out_s = step(0, 1);
  for (int i = 0; i < kMaxSpatial; ++i) {
    in_s = smaller(in_s, step(p.in.s[i], p.axis[i].I));
    w_s = smaller(w_s, step(p.w.s[i], p.axis[i].R));
    out_s = smaller(out_s, step(p.out.s[i], p.axis[i].O));
  }
  const int64_t in_ch = step(p.in.channel, p.chs), in_img = step(p.in.outer, p.imgs);
  const int64_t w_ch = step(p.w.channel, p.chs), w_k = step(p.w.outer, p.ks);
  const bool long_reduction = p.taps() > p.pixels();  // the weight gradient: r runs over the pixels, o over the taps
  if (in_ch <= in_img && in_ch <= in_s) {             // channels contiguous: the reduction walks along them
    c.a_k_fast = true, c.k_ch_fast = true, c.m_img_fast = false;
  } else if (in_img <= in_s) {                        // weight gradient, channels contiguous: they are the rows
    c.a_k_fast = false, c.m_img_fast = true, c.k_ch_fast = w_ch < w_s;
  } else if (long_reduction) {                        // weight gradient, pixels contiguous: the reduction walks along them
    c.a_k_fast = true, c.k_ch_fast = false, c.m_img_fast = false;
  } else {                                            // pixels contiguous: the rows walk along them
    c.a_k_fast = false, c.m_img_fast = false, c.k_ch_fast = w_ch < w_s;
  }
  c.b_k_fast = (c.k_ch_fast ? w_ch : w_s) < w_k;
  c.out_k_fast = step(p.out.channel, p.ks) <= (c.m_img_fast ? step(p.out.outer, p.imgs) : out_s);

  // Direct: depthwise and groups of up to 8 x 8 channels would fill at most an eighth of any tile.
  const int64_t inner = p.op == Op::kWeightGrad ? p.imgs : p.chs;
  const bool narrow = p.groups > 1 && p.ks <= 8 && inner <= 8 && p.algorithm != Algorithm::kImplicitGemm;
  if ((narrow || p.algorithm == Algorithm::kDirect) && p.pixels() * p.ks * p.groups <= kExtentLimit) {
    c.kernel = Kernel::kDirect;
    if (p.op == Op::kWeightGrad) {
      // Groups contiguous: 16 neighbouring channels per block (one 32 or 64 byte access) and 16 threads for each; else
      // all threads share one output and walk along the pixels.
      const int64_t in_g = step(p.in.g, p.groups);
      c.out_k_fast = in_g <= in_s;
      c.lanes = c.out_k_fast ? 16 : 1;
      c.k_ch_fast = w_ch < w_s;
      const int64_t blocks = (p.imgs * p.pixels() * p.ks * p.groups + c.lanes - 1) / c.lanes * p.batch;
      c.splits = best_splits(p, blocks, 256 / c.lanes, most_splits(p, workspace));
    } else {
      c.out_k_fast = smaller(step(p.out.channel, p.ks), step(p.out.g, p.groups)) <= out_s;
      c.lanes = 256;
    }
    return c;
  }
  // Fewer outputs want smaller tiles, so that all multiprocessors have work; the small tiles load more per product. Splits are
  // blocks, too.
  const int64_t rows = p.imgs * p.phase_pixels(), most = most_splits(p, workspace);
  const auto blocks = [&](Kernel k) { return tile_blocks(p, k) * most; };
  // Wide has no second level of sums (implicit_gemm.cuh): not for sums too long even in splits.
  const bool short_sums = p.chs * p.taps() / most <= 2 * kSerial;
  const bool padded = most > 1 && (rows + 127) / 128 * 128 * 7 > (rows + 63) / 64 * 64 * 8;  // by over an eighth more than Medium
  const bool tall = short_sums && !padded && rows > tile_of(Kernel::kMedium).m;
  if (p.ks <= 8) c.kernel = Kernel::kNarrow;  // a 64-wide tile would be empty by 7/8
  else if (tall && blocks(Kernel::kWide) >= 2 * kSMs) c.kernel = Kernel::kWide;  // two per multiprocessor hide latency
  else if (blocks(Kernel::kMedium) >= kSMs) c.kernel = Kernel::kMedium;
  else if (blocks(Kernel::kSplit) >= kSMs * 2 / 3) c.kernel = Kernel::kSplit;
  else c.kernel = Kernel::kTiny;  // such as a small weight gradient: 27 x 64 outputs, sums over all pixels
  c.splits = best_splits(p, tile_blocks(p, c.kernel), tile_sharing(c.kernel), most);
  return c;
}

}  // namespace conv
}  // namespace jaxprims
