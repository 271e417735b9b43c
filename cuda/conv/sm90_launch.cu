// Where the Hopper kernels run, and which of the three a problem gets. Without JAXPRIMS_SM90A (CMakeLists.txt sets it where
// sm_90a is among the architectures) there are none.
#include "conv/sm90_launch.h"

#include "common/tma.cuh"

namespace jaxprims {
namespace conv {

#ifdef JAXPRIMS_SM90A

bool sm90_usable() {
  static int known[64] = {};  // by device: 1 yes, -1 no; two threads that ask at once find the same
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  if (known[device] != 0) return known[device] > 0;
  int major = 0, minor = 0;
  const bool asked = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  const bool yes = asked && major == 9 && minor == 0 && tma::driver_function("cuTensorMapEncodeTiled") != nullptr &&
                   tma::driver_function("cuTensorMapEncodeIm2col") != nullptr;
  known[device] = yes ? 1 : -1;
  return yes;
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
