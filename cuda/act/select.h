// Which softmax kernel takes a contiguous row. Pure: no CUDA, no state.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace jaxprims {

// The threads of a row: `group` lanes of a warp, or (0) the block or a cluster of blocks; each keeps `vectors` 16-byte vectors in registers.
struct RowShape {
  int group = 0, vectors = 0, threads = 0, cluster = 1;  // threads of a block, of which `cluster` share a row; 0: the row does not fit
  int rows() const { return group ? threads / group : 1; }  // of a block
};

// `n` elements of which V make a vector; `pair`: two operands are kept. A row that does not start at a multiple of V reaches over
// up to one vector more. Lanes of a warp where 32 elements a thread (pairs 16) do: no barrier at all. Else a block, of 16 elements a
// thread (pairs 8) as long as 512 threads do: few registers, many blocks on an SM.
inline RowShape row_shape(int64_t n, int V, bool pair) {
  const int64_t vectors = n % V == 0 ? n / V : (n + V - 1) / V + 1;
  const int most = pair ? 16 : 32;  // elements of a thread
  for (const int group : {8, 32})
    for (int e = pair || group == 8 ? 8 : 16; e <= most; e *= 2)
      if (vectors * V <= group * e) return {group, e / V, 256, 1};
  for (int e = most / 2; e <= most; e *= 2)
    if (const int64_t threads = (vectors * V + e - 1) / e; threads <= (e == most ? 1024 : 512))
      return {0, e / V, static_cast<int>((threads + 31) / 32 * 32), 1};
  return {};
}

// Rows of whole vectors of a half type: up to 32 elements (pairs 16) a thread of lanes, a block, or 2 or 4 blocks where `clusters`
// are to be had.
inline RowShape whole_shape(int64_t n, int V, bool pair, bool clusters) {
  if (n % V != 0 || (pair && n > 128 && n <= 256)) return {};
  const int most = pair ? 16 : 32;
  if (n <= 64) return {4, 16 / V, 256, 1};
  if (n <= 256) return {8, (n <= 128 ? 16 : 32) / V, 256, 1};
  if (n <= 32 * most) return {32, (n <= 512 ? 16 : 32) / V, 256, 1};
  int c = 1;
  while (n > int64_t{512} * most * c && c < 4) c *= 2;
  if (n > int64_t{512} * most * c || (c > 1 && !clusters)) return {};
  return {0, most / V, static_cast<int>(((n + most * c - 1) / (most * c) + 31) / 32 * 32), c};
}

}  // namespace jaxprims
