// What a norm launcher receives: every array by name, the index arithmetic, and the options.
#pragma once
#include <cuda_runtime.h>

#include "common/act.cuh"
#include "norm/index.h"
#include "norm/params.h"

namespace jaxprims {
namespace norm {

enum class Type : int { kAbsent = 0, kSame = 1, kFloat = 2, kBool = 3 };  // kSame: the dtype of x

struct Array {
  void* data = nullptr;
  Type type = Type::kAbsent;
  Runs runs;
  NORM_HD bool here() const { return type != Type::kAbsent; }
};

// Count, pivot, mean of x - pivot, sum of squared deviations; or two sums and a count. What a thread gathers of a statistic.
struct alignas(16) Value {
  float n, p, a, b;
};

// What a reduction gathers.
enum class Gather : int {
  kMoments,   // of x: for mean and var ("rms": the sum of squares)
  kTangent,   // sum xd, sum xhat * xd: for yd, tmean, tvar
  kBackward,  // sum g, sum g * xhat: for dx
  kParam,     // sum h, sum h * xhat: dbias, dscale
  kFixed,     // sum rstd * g, sum rstd^2 * g * xhat: dmean, dvar
};

struct Problem {
  Array a[kNames];
  int64_t total = 0;
  bool wide = false, rms = false, fixed = false;
  Act act = Act::kNone;
  float eps = 0.f;
  View view;      // the statistics that this launch reduces
  Plan plan;
  Runs by_stat;   // element -> statistic of `view`
  Value* partial = nullptr;  // [chunks][statistics], then the totals [statistics]
  Value* totals = nullptr;
};

// One reduction, and behind it (where `then` is set) the elementwise pass that needs it.
cudaError_t forward(ffi::DataType dtype, const Problem& p, bool then, cudaStream_t stream);
cudaError_t tangent(ffi::DataType dtype, const Problem& p, cudaStream_t stream);
cudaError_t backward(ffi::DataType dtype, const Problem& p, Gather gather, bool then, cudaStream_t stream);
// The elementwise passes with statistics given (or, for forward, already in place).
cudaError_t forward_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream);
cudaError_t tangent_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream);
cudaError_t backward_apply(ffi::DataType dtype, const Problem& p, cudaStream_t stream);

struct LrnShape {
  int64_t outer, channels, inner;  // of the result
  int64_t x_period, d_period;      // elements of x and of the tangent: a leading batch axis may be missing
  int size;
  float alpha, beta, k;
};
cudaError_t lrn(ffi::DataType dtype, const void* x, void* y, const LrnShape& s, cudaStream_t stream);
cudaError_t lrn_jvp(ffi::DataType dtype, const void* x, const void* xd, void* yd, const LrnShape& s, cudaStream_t stream);
cudaError_t lrn_bwd(ffi::DataType dtype, const void* x, const void* dy, void* dx, const LrnShape& s, cudaStream_t stream);

}  // namespace norm
}  // namespace jaxprims
