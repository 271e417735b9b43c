// What the strip kernels share (max_strip.cu, avg_strip.cu): the pool as they see it, and vectors of channels as 32-bit words.
//
// A strip pool has two spatial axes, one square window R x R, R = 2 or 3, one stride U for both, no dilation, padding below the
// window (select.h, `strip_window`). A thread owns V channels of one column of outputs (forward) or of one block of U columns of the
// image (backward), and walks down a strip of rows: what rows share it keeps in registers, and no division is left in its loop.
#pragma once
#include "pool/common.cuh"

namespace jaxprims::pool {

struct Strip {
  int h = 0, w = 0, p = 0, q = 0;      // sizes of the image and of the output
  int pad_h = 0, pad_w = 0;
  int channels = 1;
  int length = 1;                      // rows of outputs (blocks of U rows of the image) of one thread
  int rows = 0;                        // of these in all
  int row0 = 0, col0 = 0;              // backward: the first block of rows and columns that has elements of the image
  int64_t in_image = 0, out_image = 0;
};

// Images, strips, columns and channel groups as items (item_at: i1 strip, i2 column), for the forward or the backward.
template <int U>
inline Strip strip_of(const Pool& pool, int groups, bool backward, Items& items) {
  const Axis &a0 = pool.axis[0], &a1 = pool.axis[1], &a2 = pool.axis[2];
  Strip s;
  s.h = a1.size, s.w = a2.size, s.p = a1.out, s.q = a2.out;
  s.pad_h = a1.pad, s.pad_w = a2.pad, s.channels = pool.channels;
  s.in_image = pool.in_image / a0.size, s.out_image = pool.out_image / a0.out;  // axis 0 is more images
  int columns = s.q;
  s.rows = s.p;
  if (backward) {
    s.row0 = s.pad_h / U, s.col0 = s.pad_w / U;
    s.rows = (s.h - 1 + s.pad_h) / U - s.row0 + 1;
    columns = (s.w - 1 + s.pad_w) / U - s.col0 + 1;
  }
  const int64_t images = pool.images * a0.size;
  s.length = strip_length(images * columns * groups, s.rows);
  items = Items(images, 1, static_cast<int>(ceil_div(s.rows, s.length)), columns, groups);
  return s;
}

// --- V elements as 32-bit words, with comparisons in each lane of a word --------------------------------------------------
// Two 16-bit elements share a word; a lone one (V = 1) has it twice. `pick` takes a where v and m are equal, else b.

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr uint32_t kLowest = 0xff800000u, kSign = 0x80000000u, kOnes = 1u;  // -inf; the number 1 in each lane
  __device__ static __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(r);
  }
  __device__ static __forceinline__ uint32_t pick(uint32_t v, uint32_t m, uint32_t a, uint32_t b) {
    return __uint_as_float(v) == __uint_as_float(m) ? a : b;
  }
  __device__ static __forceinline__ bool ordinary(uint32_t m) { return __uint_as_float(m) > -INFINITY; }
};

template <class T, class T2>
struct HalfLanes {
  static constexpr uint32_t kSign = 0x80008000u, kOnes = 0x00010001u;
  __device__ static __forceinline__ T2 as2(uint32_t a) { return *reinterpret_cast<T2*>(&a); }
  __device__ static __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    T2 r = __hmax2_nan(as2(a), as2(b));
    return *reinterpret_cast<uint32_t*>(&r);
  }
  __device__ static __forceinline__ uint32_t pick(uint32_t v, uint32_t m, uint32_t a, uint32_t b) {
    const uint32_t mask = __heq2_mask(as2(v), as2(m));
    return (mask & a) | (~mask & b);
  }
};
template <>
struct Lanes<__half> : HalfLanes<__half, __half2> {
  static constexpr uint32_t kLowest = 0xfc00fc00u;
  __device__ static __forceinline__ bool ordinary(uint32_t m) { return __hgt2_mask(as2(m), as2(kLowest)) == ~0u; }
};
template <>
struct Lanes<__nv_bfloat16> : HalfLanes<__nv_bfloat16, __nv_bfloat162> {
  static constexpr uint32_t kLowest = 0xff80ff80u;
  __device__ static __forceinline__ bool ordinary(uint32_t m) { return __hgt2_mask(as2(m), as2(kLowest)) == ~0u; }
};

template <class T, int V>
constexpr int kWords = V == 1 ? 1 : V * static_cast<int>(sizeof(T)) / 4;

template <class T, int V>
__device__ __forceinline__ void load_words(uint32_t (&w)[kWords<T, V>], const T* src) {
  if constexpr (V > 1) {
    const uint4 u = __ldg(reinterpret_cast<const uint4*>(src));
    w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
  } else if constexpr (sizeof(T) == 4) {
    w[0] = __ldg(reinterpret_cast<const uint32_t*>(src));
  } else {
    w[0] = __ldg(reinterpret_cast<const uint16_t*>(src)) * 0x10001u;
  }
}

template <class T, int V>
__device__ __forceinline__ void store_words(T* dst, const uint32_t (&w)[kWords<T, V>]) {
  if constexpr (V > 1) *reinterpret_cast<uint4*>(dst) = make_uint4(w[0], w[1], w[2], w[3]);
  else if constexpr (sizeof(T) == 4) *reinterpret_cast<uint32_t*>(dst) = w[0];
  else *reinterpret_cast<uint16_t*>(dst) = static_cast<uint16_t>(w[0]);
}

// Element v of the words, as a number.
template <class T, int V>
__device__ __forceinline__ float number(const uint32_t (&w)[kWords<T, V>], int v) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(w[v]);
  else if constexpr (std::is_same<T, __nv_bfloat16>::value)
    return __uint_as_float(v % 2 ? w[v / 2] & 0xffff0000u : w[v / 2] << 16);
  else return __half2float(__ushort_as_half(static_cast<unsigned short>(v % 2 ? w[v / 2] >> 16 : w[v / 2])));
}

// V one-byte places, four to a word.
template <int V>
constexpr int kPlaceWords = V <= 4 ? 1 : V / 4;

template <int V>
__device__ __forceinline__ void load_place_words(uint32_t (&k)[kPlaceWords<V>], const uint8_t* src) {
  if constexpr (V == 1) k[0] = __ldg(src);
  else if constexpr (V == 4) k[0] = __ldg(reinterpret_cast<const uint32_t*>(src));
  else {
    const uint2 u = __ldg(reinterpret_cast<const uint2*>(src));
    k[0] = u.x, k[1] = u.y;
  }
}

// From the lanes of `pick` (one number in each) to bytes.
template <class T, int V>
__device__ __forceinline__ void store_place_words(uint8_t* dst, const uint32_t (&k)[kWords<T, V>]) {
  if constexpr (V == 1) *dst = static_cast<uint8_t>(k[0]);
  else if constexpr (sizeof(T) == 4) *reinterpret_cast<uint32_t*>(dst) = k[0] | k[1] << 8 | k[2] << 16 | k[3] << 24;
  else *reinterpret_cast<uint2*>(dst) = make_uint2(__byte_perm(k[0], k[1], 0x6420), __byte_perm(k[2], k[3], 0x6420));
}

}  // namespace jaxprims::pool
