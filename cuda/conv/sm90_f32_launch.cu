// Where the Hopper kernels for float32 run, and which of the two a problem gets.
#include "conv/sm90_f32_launch.h"

#include <atomic>

#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {

#ifdef JAXPRIMS_SM90A

bool sm90_f32_usable() {
  static std::atomic<bool> known[64] = {};  // by device: prepared; two threads that ask at once prepare twice
  int device = 0;
  if (!sm90_usable() || cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  if (known[device].load(std::memory_order_acquire)) return true;
  if (sm90_f32_prepare_forward() != cudaSuccess || sm90_f32_prepare_input_grad() != cudaSuccess) {
    (void)cudaGetLastError();  // asked again at the next call
    return false;
  }
  known[device].store(true, std::memory_order_release);
  return true;
}

cudaError_t sm90_f32_launch(const Problem& p, const Sm90F32Plan& plan, cudaStream_t stream) {
  return p.op == Op::kForward ? sm90_f32_forward(p, plan, stream) : sm90_f32_input_grad(p, plan, stream);
}

#else

bool sm90_f32_usable() { return false; }
cudaError_t sm90_f32_launch(const Problem&, const Sm90F32Plan&, cudaStream_t) { return cudaErrorNotSupported; }

#endif

}  // namespace conv
}  // namespace jaxprims
