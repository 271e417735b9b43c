// Where the first-layer kernels run, and which of the three a problem gets.
#include "conv/first_launch.h"

#include "conv/sm90_launch.h"

#include <atomic>

namespace jaxprims {
namespace conv {

bool first_usable() {
  static std::atomic<int> known[64] = {};  // by device: 1 yes, -1 no; two threads that ask at once find the same
  int device = 0, bytes = 0;
  const auto failed = [] {  // asked again at the next call; the error is not the caller's
    (void)cudaGetLastError();
    return false;
  };
  if (cudaGetDevice(&device) != cudaSuccess) return failed();
  if (device < 0 || device >= 64) return false;
  const int before = known[device].load(std::memory_order_acquire);
  if (before != 0) return before > 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return failed();
  if (bytes > kFirstShared) bytes = kFirstShared;
  for (const auto prepare : {first_forward_prepare, first_input_grad_prepare, first_weight_grad_prepare})
    if (prepare(bytes) != cudaSuccess) return failed();
#ifdef JAXPRIMS_SM90A
  if (sm90_usable() && first_forward_sm90_prepare(bytes) != cudaSuccess) return failed();
#endif
  known[device].store(1, std::memory_order_release);
  return true;
}

// cudaErrorInvalidValue: the GPU's blocks have less shared memory than the plan needs.
cudaError_t first_launch(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream) {
  switch (p.op) {
    case Op::kForward:
#ifdef JAXPRIMS_SM90A
      if (f.sm90) return first_forward_sm90_launch(p, f, stream);
#endif
      return first_forward_launch(p, f, stream);
    case Op::kInputGrad: return first_input_grad_launch(p, f, stream);
    case Op::kWeightGrad: return first_weight_grad_launch(p, f, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace conv
}  // namespace jaxprims
