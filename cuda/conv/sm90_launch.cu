// Where the Hopper kernels run, and which of the three a problem gets. Without JAXPRIMS_SM90A (CMakeLists.txt sets it where
// sm_90a is among the architectures) there are none.
#include "conv/sm90_launch.h"

#include <atomic>

#include "common/tma.cuh"

namespace jaxprims {
namespace conv {

#ifdef JAXPRIMS_SM90A

bool sm90_usable() {
  static std::atomic<int> known[64] = {};  // by device: 1 yes, -1 no; two threads that ask at once find the same
  int device = 0;
  const auto failed = [] {  // asked again at the next call; the error is not the caller's
    (void)cudaGetLastError();
    return false;
  };
  if (cudaGetDevice(&device) != cudaSuccess) return failed();
  if (device < 0 || device >= 64) return false;
  const int before = known[device].load(std::memory_order_acquire);
  if (before != 0) return before > 0;
  const auto remember = [&](bool yes) {
    known[device].store(yes ? 1 : -1, std::memory_order_release);
    return yes;
  };
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
    return failed();
  if (major != 9 || minor != 0) return remember(false);
  if (tma::driver_function("cuTensorMapEncodeTiled") == nullptr || tma::driver_function("cuTensorMapEncodeIm2col") == nullptr)
    return failed();
  for (const auto prepare : {sm90_prepare_forward, sm90_prepare_input_grad, sm90_prepare_weight_grad})
    if (prepare() != cudaSuccess) return failed();
  return remember(true);
}

cudaError_t sm90_launch(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream) {
  switch (p.op) {
    case Op::kForward: return sm90_forward(p, plan, stream);
    case Op::kInputGrad: return sm90_input_grad(p, plan, stream);
    case Op::kWeightGrad: return sm90_weight_grad(p, plan, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

#else

bool sm90_usable() { return false; }
cudaError_t sm90_launch(const Problem&, const Sm90Plan&, void*, cudaStream_t) { return cudaErrorNotSupported; }

#endif

}  // namespace conv
}  // namespace jaxprims
