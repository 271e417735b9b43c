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

}  // namespace jaxprims
