// The vector kernels' launchers. Each takes a Problem whose arrays select.h has found fit, in 16-byte vectors throughout.
#pragma once
#include "norm/problem.h"
#include "norm/select.h"

namespace jaxprims {
namespace norm {

// The same by row_plain_plan where it takes the rows: no activation, no residual, statistics float32.
cudaError_t rows_plain(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream);
cudaError_t rows_forward(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream);
// dx (and dresidual), and with `sums` dscale and dbias through `partial` [blocks][2][length].
cudaError_t rows_backward(ffi::DataType dtype, const Problem& p, const RowPlan& q, float* partial, bool sums, cudaStream_t stream);
// dscale and dbias from those partial sums.
cudaError_t rows_add_sums(ffi::DataType dtype, const Problem& p, const RowPlan& q, const float* partial, cudaStream_t stream);
// The same for rows of any length, by row_odd_plan.
cudaError_t rows_odd_forward(ffi::DataType dtype, const Problem& p, const RowPlan& q, cudaStream_t stream);
cudaError_t rows_odd_backward(ffi::DataType dtype, const Problem& p, const RowPlan& q, float* partial, bool sums, cudaStream_t stream);

// Statistics into their results through `partial` [outer][chunks][width].
cudaError_t columns_moments(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, Value* partial, cudaStream_t stream);
// y from the statistics given.
cudaError_t columns_forward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, cudaStream_t stream);
// sum h, sum h xhat of the columns into `partial`; from them `totals` (one Value per statistic) where that is not null, dscale
// and dbias: per column (`each` 0: not wanted, 1: over all of outer, 2: one per outer).
cudaError_t columns_sums(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, float2* partial, Value* totals, int each,
                         cudaStream_t stream);
// dx (and dresidual) from the totals.
cudaError_t columns_backward(ffi::DataType dtype, const Problem& p, const ColumnPlan& q, const Value* totals, cudaStream_t stream);

}  // namespace norm
}  // namespace jaxprims
