// What the bias_act handlers hand to the launcher in bias_act.cu.
#pragma once
#include <cuda_runtime.h>

#include "act/params.h"
#include "common/act.cuh"

namespace jaxprims {

struct BiasActProblem {
  Act act;
  int64_t total;            // elements of the result
  int64_t channels, inner;  // below the batch axes an element e has channel (e / inner) % channels
  bool bias_float32;        // the bias is float32 whatever x is
  Lead lead;                // operands 0: x, 1: bias, 2: residual, 3: tangent; units are elements
};

// bias, residual: nullptr where absent. t: nullptr for y = act(z), else the tangent and out = slope(z) * t.
template <class T>
cudaError_t launch_bias_act(const T* x, const void* bias, const T* residual, const T* t, T* out, const BiasActProblem& p,
                            cudaStream_t stream);

}  // namespace jaxprims
