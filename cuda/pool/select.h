// Which kernel takes a pool. Pure: no CUDA, no state.
#pragma once
#include <cstdint>

#include "pool/window.h"

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

// Windows that have kernels of their own (strip.cuh): the common ones, two spatial axes alike, everything known to the compiler.
enum class StripWindow { kNone, k3s2, k3s1, k2s2 };

inline bool alike(const Axis& a, int window, int stride) {
  return a.window == window && a.stride == stride && a.dilation == 1 && a.pad >= 0 && a.pad < window;
}

inline StripWindow strip_window(const Axis (&axis)[3], bool adaptive) {
  const Axis& a0 = axis[0];  // none: its places are as good as images
  if (adaptive || a0.window != 1 || a0.stride != 1 || a0.pad != 0 || a0.size != a0.out) return StripWindow::kNone;
  if (alike(axis[1], 3, 2) && alike(axis[2], 3, 2)) return StripWindow::k3s2;
  if (alike(axis[1], 3, 1) && alike(axis[2], 3, 1)) return StripWindow::k3s1;
  if (alike(axis[1], 2, 2) && alike(axis[2], 2, 2)) return StripWindow::k2s2;
  return StripWindow::kNone;
}

// Rows of one thread. Longer strips read fewer rows twice, shorter ones give more threads: at least 2^18, which is what 132
// SMs hold at once (2048 each), as long as there are rows to split.
inline int strip_length(int64_t columns, int rows) {
  for (int length = 16; length > 1; length /= 2)
    if (columns * ((rows + length - 1) / length) >= (1 << 18)) return length;
  return 1;
}

// A window that is the whole image: no index is left to compute.
inline bool whole_image(const Axis (&axis)[3]) {
  for (const Axis& a : axis)
    if (a.out != 1 || a.window != a.size || a.pad != 0 || a.dilation != 1) return false;
  return true;
}

}  // namespace jaxprims::pool
