// What the kernels that walk down an image row by row share (band.cuh, narrow.cuh): which convolutions they take, and how the work
// is cut. A pure function, no CUDA.
//
// Stride 1, two spatial axes, channels last, 16-bit elements: in row = out row + r * dil_h + base_h, in column alike, with the taps walked
// backwards where the axis has them reversed (an input gradient). A dilation splits an image into dil_h x dil_w pieces, of which each
// is dense: out row = dil_h * p + f, in row = dil_h * (p + r) + f + base_h. Below, p and p + r are a piece's rows.
// A tile is `images` x a piece's span of `cols` output columns x all its rows; a block owns one chunk of channels and a run of output
// rows that passes from tile to tile, so that all blocks have the same number of rows.
#pragma once
#include <cstdint>

#include "conv/problem.h"

namespace jaxprims {
namespace conv {

constexpr int64_t kWalkReach = int64_t{1} << 31;

struct RowWalk {
  const char* reason = "";               // null: taken
  int32_t R = 1, S = 1;                  // taps
  int32_t base_h = 0, base_w = 0;        // input row and column of output 0 and tap 0
  int32_t reversed_h = 0, reversed_w = 0;
  int32_t images = 1, cols = 1;          // of a tile
  int32_t window = 1;                    // input columns of a tile
  int32_t OH = 1, OW = 1, IH = 1, IW = 1;  // extents of the images: y's and x's (an input gradient: dx's and dy's)
  int32_t dil_h = 1, dil_w = 1;
  int32_t pieces_h = 1, pieces_w = 1;    // with an output
  int32_t piece_h = 1, tiles_w = 1;      // rows of a piece; tiles side by side in it
  int32_t chunks = 1, per_chunk = 1;     // of channels; blocks of a chunk
  int64_t rows = 0;                      // output rows of all tiles
  int64_t blocks() const { return int64_t{chunks} * per_chunk; }
};

inline void walk_pieces(RowWalk* d) {
  if (d->R == 1) d->dil_h = 1;
  if (d->S == 1) d->dil_w = 1;
  d->pieces_h = d->dil_h < d->OH ? d->dil_h : d->OH, d->pieces_w = d->dil_w < d->OW ? d->dil_w : d->OW;
  d->piece_h = (d->OH - 1) / d->dil_h + 1;
}
// Columns of a piece.
inline int32_t walk_columns(const RowWalk& d) { return (d.OW - 1) / d.dil_w + 1; }

// The conditions that do not depend on how many channels a group has.
inline RowWalk row_walk(const Problem& p) {
  RowWalk d;
  if (p.op == Op::kWeightGrad) { d.reason = "a weight gradient"; return d; }
  if (p.in_type == Type::kF32 || p.in_type != p.out_type) { d.reason = "not 16-bit elements"; return d; }
  if (p.batch != 1) { d.reason = "a true batch"; return d; }
  if (p.empty() || p.taps() == 0) { d.reason = "empty"; return d; }
  if (p.residual != nullptr || p.activation > 1) { d.reason = "an epilogue other than bias and ReLU"; return d; }
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  if (a0.O != 1 || a0.R != 1 || a0.I != 1 || a0.c != 0) { d.reason = "three spatial axes"; return d; }
  for (const Axis* a : {&a1, &a2})
    if (a->a != 1 || a->e != 1) { d.reason = "a stride"; return d; }
  const TensorStrides &in = p.in, &out = p.out;
  if (in.offset != 0 || out.offset != 0 || p.groups < 2) { d.reason = "channels are not contiguous"; return d; }
  const int64_t C = p.groups * p.chs;
  if (C % 8 != 0 || C != p.groups * p.ks) { d.reason = "channels are not a multiple of 8"; return d; }
  for (const int64_t s : {in.outer, in.s[1], in.s[2], out.outer, out.s[1], out.s[2]})
    if (s % 8 != 0 || s < 0 || 32 * s >= kWalkReach) { d.reason = "a pixel's channels do not start on 16 bytes"; return d; }
  if (reinterpret_cast<uintptr_t>(p.in_data) % 16 != 0 || reinterpret_cast<uintptr_t>(p.out_data) % 16 != 0) {
    d.reason = "an array does not start on 16 bytes";
    return d;
  }
  d.R = a1.R, d.S = a2.R;
  d.reversed_h = a1.b < 0, d.reversed_w = a2.b < 0;
  d.dil_h = a1.b < 0 ? -a1.b : a1.b, d.dil_w = a2.b < 0 ? -a2.b : a2.b;
  d.base_h = d.reversed_h ? a1.c - (a1.R - 1) * d.dil_h : a1.c, d.base_w = d.reversed_w ? a2.c - (a2.R - 1) * d.dil_w : a2.c;
  d.OH = a1.O, d.OW = a2.O, d.IH = a1.I, d.IW = a2.I;
  walk_pieces(&d);
  d.reason = nullptr;
  return d;
}

// Tiles and blocks, once images and cols of a tile are known.
inline void walk_blocks(const Problem& p, int64_t chunk_channels, int64_t resident, RowWalk* d) {
  const int64_t imgs = p.op == Op::kWeightGrad ? p.chs : p.imgs, tiles_n = (imgs + d->images - 1) / d->images * d->pieces_h * d->pieces_w;
  d->tiles_w = (walk_columns(*d) + d->cols - 1) / d->cols;
  d->chunks = static_cast<int32_t>((p.groups * p.ks + chunk_channels - 1) / chunk_channels);
  d->rows = tiles_n * d->tiles_w * d->piece_h;
  int64_t per = resident / d->chunks;
  if (per > (d->rows + 1) / 2) per = (d->rows + 1) / 2;  // two rows a block at the least: the walk in reads R - 1 more
  d->per_chunk = static_cast<int32_t>(per < 1 ? 1 : per);
  if (d->rows >= kWalkReach || tiles_n * d->tiles_w >= kWalkReach || d->blocks() >= kWalkReach) d->reason = "more than 2^31 rows";
}

// The part of a block's run that lies in one tile: output rows [p0, p1) of a piece from its input rows [h0, h1), of which [low, high) are
// inside of the image.
struct WalkPart {
  int32_t image, column, f, g, p0, p1, h0, h1, low, high;  // the tile's first image and column; the piece
};
CONV_HD inline WalkPart walk_part(const RowWalk& d, int32_t row, int32_t end) {
  int32_t tile = row / d.piece_h;
  WalkPart r;
  r.p0 = row - tile * d.piece_h;
  r.p1 = end - row < d.piece_h - r.p0 ? r.p0 + (end - row) : d.piece_h;
  int32_t q = tile / d.tiles_w;
  r.column = (tile - q * d.tiles_w) * d.cols, tile = q;
  q = tile / d.pieces_w, r.g = tile - q * d.pieces_w, tile = q;
  q = tile / d.pieces_h, r.f = tile - q * d.pieces_h;
  r.image = q * d.images;
  r.h0 = r.p0, r.h1 = r.p1 + d.R - 1;
  const int32_t first = r.f + d.base_h;  // the image's row of the piece's row 0
  const int32_t low = first < 0 ? (-first + d.dil_h - 1) / d.dil_h : 0, high = first < d.IH ? (d.IH - 1 - first) / d.dil_h + 1 : 0;
  r.low = low > r.h0 ? low : r.h0, r.high = high < r.h1 ? high : r.h1;
  return r;
}

}  // namespace conv
}  // namespace jaxprims
