// The options of every pool, as they come from Python (PoolConfig mirrors jaxprims/pool/window.py's PoolParams) and as the
// kernels read them (Pool).
//
// Layouts. NHWC is images x (D, H, W) x channels. NCHW is the same with N*C images of one channel: the kernels know only the
// first. One and two spatial axes are three, of which the leading ones have size one.
//
// Limits (jaxprims/pool/primitive.py, `_supports`): one image, channels included, below 2^31 elements; any number of images; float32,
// float16, bfloat16; places as uint8, uint16 or int32.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/fastdiv.h"
#include "common/ffi.h"
#include "pool/select.h"
#include "pool/window.h"

namespace jaxprims::pool {

constexpr int kMaxBatchAxes = 4;
enum Divisor : int { kSum = 0, kAllPlaces = 1, kPlacesInside = 2 };

struct PoolConfig {
  Ints in_size, out_size, window, strides, padding, dilation;
  int64_t adaptive, channels_last, minimum, flat, divisor;
  int64_t batch_axes, data_mask, index_mask;  // gather and scatter: bit k: that operand has leading batch axis k of the result
};

// How the images of a gather's or scatter's result map to those of its operands: image = (b_0, .., b_{axes-1}, n).
struct Batch {
  int axes = 0;
  int64_t inner = 1;  // n: images behind the batch axes
  int64_t size[kMaxBatchAxes] = {}, data_stride[kMaxBatchAxes] = {}, index_stride[kMaxBatchAxes] = {};  // in images; 0: not there
};

struct Pool {
  Axis axis[3];
  FastDiv window1, window2, size1, size2;  // places and elements along the two inner axes
  uint32_t places = 1;
  bool adaptive = false, minimum = false;
  bool flat = false;  // maxima are told by the element's index in the image (int32), not by the place in the window
  int divisor = kSum;
  int channels = 1;
  int64_t images = 0;
  int64_t in_image = 0, out_image = 0;  // elements of one image
  Batch batch;
};

// Work items (image, three spatial indices, channel group) and how an item's number is taken apart.
struct Items {
  int64_t total = 0;
  int64_t per_image = 1;
  bool small = false;  // total < 2^31: no 64-bit division
  FastDiv image, group, s2, s1;
  Items(int64_t images, int a0, int a1, int a2, int groups)
      : per_image(int64_t{a0} * a1 * a2 * groups), image(per_image), group(groups), s2(a2), s1(a1) {
    total = images * per_image;
    small = total <= INT32_MAX;
  }
};

// Launchers. `place` holds places of `place_bytes` 1, 2 or 4, or flat indices (4). Each returns cudaGetLastError().
template <class T>
cudaError_t launch_max(const Pool&, const T* x, T* y, void* place, int place_bytes, cudaStream_t);
template <class T>
cudaError_t launch_gather(const Pool&, const T* t, const void* place, int place_bytes, T* y, cudaStream_t);
template <class T>
cudaError_t launch_scatter(const Pool&, const T* dy, const void* place, int place_bytes, T* dx, cudaStream_t);
template <class T>
cudaError_t launch_avg(const Pool&, const T* x, T* y, cudaStream_t);
template <class T>
cudaError_t launch_avg_dx(const Pool&, const T* dy, T* dx, cudaStream_t);

// The same for the windows of select.h's `strip_window`; places of one byte, no batch axes.
template <class T>
cudaError_t launch_max_strip(StripWindow, const Pool&, const T* x, T* y, uint8_t* place, cudaStream_t);
template <class T>
cudaError_t launch_max_strip_dx(StripWindow, const Pool&, const T* dy, const uint8_t* place, T* dx, cudaStream_t);
template <class T>
cudaError_t launch_avg_strip(StripWindow, const Pool&, const T* x, T* y, cudaStream_t);
template <class T>
cudaError_t launch_avg_strip_dx(StripWindow, const Pool&, const T* dy, T* dx, cudaStream_t);
// One window that is the whole image (select.h's `whole_image`).
template <class T>
cudaError_t launch_avg_image(const Pool&, const T* x, T* y, cudaStream_t);
template <class T>
cudaError_t launch_avg_image_dx(const Pool&, const T* dy, T* dx, cudaStream_t);

}  // namespace jaxprims::pool
