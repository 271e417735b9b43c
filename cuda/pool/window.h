// Where windows lie: the arithmetic of jaxprims/pool/window.py, along one spatial axis. No CUDA: tests compile it with any C++.
//
// Output o reads the places r of its window at
//   regular   start(o) = o*stride - pad,        r = 0 .. window-1, element start + r*dilation
//   adaptive  start(o) = floor(o*size/out),     r = 0 .. ceil((o+1)*size/out) - start - 1, element start + r
// and of these only those inside [0, size). The caller sees to it (handlers.cu) that every sum below stays within int32.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define JAXPRIMS_HD __host__ __device__ __forceinline__
#else
#define JAXPRIMS_HD inline
#endif

namespace jaxprims::pool {

struct Axis {
  int size = 1, out = 1, window = 1, stride = 1, pad = 0, dilation = 1;
};

// The window of one output: its places first .. end-1 are inside the image, place r is element start + r*dilation.
struct Window {
  int start, first, end;
};

JAXPRIMS_HD Window window_of(const Axis& a, bool adaptive, int o) {
  if (adaptive) {
    const int start = static_cast<int>(int64_t{o} * a.size / a.out);
    const int stop = static_cast<int>((int64_t{o + 1} * a.size + a.out - 1) / a.out);
    return {start, 0, stop - start};
  }
  const int start = o * a.stride - a.pad;
  int first = 0, end = a.window;
  if (start < 0) first = (-start + a.dilation - 1) / a.dilation;
  if (start >= a.size) end = 0;
  else if (start + (a.window - 1) * a.dilation >= a.size) end = (a.size - 1 - start) / a.dilation + 1;
  return {start, first, end > first ? end : first};
}

// The outputs lo .. end-1 whose windows reach over element i; with a dilation some of them step over it (place_of < 0).
struct Outputs {
  int lo, end;
};

JAXPRIMS_HD Outputs outputs_over(const Axis& a, bool adaptive, int i) {
  if (adaptive) {
    // stop(o) > i  <=>  o >= floor(i*out/size);   start(o) <= i  <=>  o < ceil((i+1)*out/size)
    return {static_cast<int>(int64_t{i} * a.out / a.size),
            static_cast<int>((int64_t{i + 1} * a.out + a.size - 1) / a.size)};
  }
  const int t = i + a.pad, reach = (a.window - 1) * a.dilation;
  if (t < 0) return {0, 0};
  const int last = t / a.stride + 1;
  return {t <= reach ? 0 : (t - reach + a.stride - 1) / a.stride, last < a.out ? last : a.out};
}

// The place of element i in the window of o, or -1. Only for o from outputs_over.
JAXPRIMS_HD int place_of(const Axis& a, bool adaptive, int o, int i) {
  if (adaptive) return i - static_cast<int>(int64_t{o} * a.size / a.out);
  const int t = i + a.pad - o * a.stride;
  if (a.dilation == 1) return t;
  const int r = t / a.dilation;
  return r * a.dilation == t ? r : -1;
}

}  // namespace jaxprims::pool
