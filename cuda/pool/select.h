// Which kernel takes a pool. Pure: no CUDA, no state.
#pragma once
#include <cstdint>

namespace jaxprims::pool {

// One block instead of one thread for each group of outputs: where windows are large and outputs too few to fill the GPU
// (global pools), or windows so large that one thread's walk would be the whole run time.
inline bool whole_block_per_output(int64_t outputs, int64_t places) {
  return places >= 1024 || (places >= 32 && outputs < (1 << 16));
}

// Channel groups that one such block takes side by side: a power of two, at most a warp; the other threads split the window.
inline int block_lanes(int groups) {
  int lanes = 1;
  while (lanes < 32 && lanes < groups) lanes *= 2;
  return lanes;
}

}  // namespace jaxprims::pool
