// What the softmax handlers hand to the launchers in softmax.cu.
#pragma once
#include <cuda_runtime.h>

#include "act/params.h"

namespace jaxprims {

enum class PairOp : int { kSoftmaxJvp = 0, kLogSoftmaxJvp = 1, kLogSoftmaxBwd = 2 };

struct RowProblem {  // every array seen as [outer, n, inner], softmax along n
  int64_t outer, n, inner;
};

template <class T>
cudaError_t launch_softmax(const T* x, T* y, const RowProblem& p, bool log, bool accurate, cudaStream_t stream);

// lead: operand 0 is y, operand 1 is t; units are rows (outer without the batch axes).
template <class T>
cudaError_t launch_softmax_pair(PairOp op, const T* y, const T* t, T* out, const RowProblem& p, const Lead& lead,
                                cudaStream_t stream);

// The same for contiguous rows (inner = 1) of arrays aligned to 16 bytes, in softmax_row.cu; false: not taken, else e tells what the launch gave.
template <class T>
bool launch_softmax_rows(const T* x, T* y, int64_t rows, int64_t n, bool log, bool accurate, cudaStream_t stream, cudaError_t& e);
template <class T>
bool launch_softmax_pair_rows(PairOp op, const T* y, const T* t, T* out, int64_t rows, int64_t n, const Lead& lead,
                              cudaStream_t stream, cudaError_t& e);

}  // namespace jaxprims
