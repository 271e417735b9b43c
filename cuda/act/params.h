// Options of the softmax, activation and layout kernels, and how leading batch axes are walked. No CUDA in here.
//
// An operand of these ops may lack some of the leading batch axes that the result has (vmap of one operand alone). It is
// then read again for every index of such an axis, with stride 0, never copied. `batch` packs the facts in four bits for
// each axis, outermost first in the lowest bits: bit i is set where operand i has the axis.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define JAXPRIMS_HD __host__ __device__ __forceinline__
#else
#define JAXPRIMS_HD inline
#endif

namespace jaxprims {

constexpr int kMaxBatchAxes = 6;  // MAX_BATCH_AXES in jaxprims/act/primitive.py
constexpr int kMaxOperands = 4;

struct SoftmaxConfig {  // softmax, log_softmax, and their tangents
  int64_t axis;         // first reduced axis, counted from the end (negative)
  int64_t axes;         // number of reduced axes, adjacent
  int64_t accurate;     // subtract the maximum first
  int64_t batch_axes, batch;
};

struct BiasActConfig {  // bias_act and its tangent
  int64_t activation;   // code of enum Act
  int64_t has_bias, has_residual;
  int64_t axis;         // the bias runs along this axis, counted from the end
  int64_t batch_axes, batch;
};

struct LayoutConfig {  // (..., A axes, B axes) -> (..., B axes, A axes)
  int64_t a, b;        // how many axes A and B are
};

// The leading batch axes of one call: index `o` of the result -> index of an operand, in units of rows or elements.
struct Lead {
  int axes = 0;
  int64_t core = 1;  // units below the batch axes
  int64_t size[kMaxBatchAxes] = {};
  int64_t stride[kMaxOperands][kMaxBatchAxes] = {};

  // Offset of operand i at flat batch index b.
  JAXPRIMS_HD int64_t offset(int i, int64_t b) const {
    int64_t at = 0;
    for (int k = kMaxBatchAxes - 1; k >= 0; --k) {
      if (k >= axes) continue;
      const int64_t q = b / size[k];
      at += (b - q * size[k]) * stride[i][k];
      b = q;
    }
    return at;
  }
  // Index in operand i, whose units below the batch axes are those of the result.
  JAXPRIMS_HD int64_t at(int i, int64_t o) const {
    if (axes == 0) return o;
    const int64_t b = o / core;
    return offset(i, b) + (o - b * core);
  }
  // Operand i has the axes whose bit `bit` is set in `packed`, and `units` units below them.
  void operand(int i, int bit, int64_t packed, int64_t units) {
    for (int k = axes - 1; k >= 0; --k) {
      const bool has = (packed >> (4 * k + bit)) & 1;
      stride[i][k] = has ? units : 0;
      if (has) units *= size[k];
    }
  }
};

}  // namespace jaxprims
