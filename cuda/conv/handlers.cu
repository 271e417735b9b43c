// Convolution's four custom calls: buffers and options become a Problem, a Problem a Config, and the kernel runs.
//   conv (x, w) -> y;  conv_fused (x, w[, bias][, residual]) -> y;  conv_dx (dy, w) -> dx;  conv_dw (x, dy) -> dw; a workspace may follow
#include "common/act.cuh"
#include "conv/depthwise_launch.h"
#include "conv/first_launch.h"
#include "conv/implicit_gemm.h"
#include "conv/params.h"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace {

std::vector<int64_t> ints(const Ints& v) { return std::vector<int64_t>(v.begin(), v.end()); }

bool type_of(ffi::DataType dtype, conv::Type* type) {
  switch (dtype) {
    case ffi::DataType::F32: *type = conv::Type::kF32; return true;
    case ffi::DataType::F16: *type = conv::Type::kF16; return true;
    case ffi::DataType::BF16: *type = conv::Type::kBF16; return true;
    default: return false;
  }
}

// The bias of a fused convolution, and then its residual, follow x and w.
ffi::Error add_epilogue(const char* op, const Buffers& in, const Buffer& y, const ConvConfig& c, conv::Problem* p) {
  const std::string name(op);
  if (c.activation < 0 || c.activation >= kActCount) return bad(name + ": unknown activation " + std::to_string(c.activation));
  p->activation = static_cast<int>(c.activation);
  size_t next = 2;
  if (c.has_bias) {
    const Buffer& bias = in[next++];
    const int64_t k = p->ks * p->groups;
    const std::vector<int64_t> want = c.bias_batched ? std::vector<int64_t>{p->batch, k} : std::vector<int64_t>{k};
    if (bias.dims != want) return bad(name + ": bias has shape " + conv::show(bias.dims) + ", expected " + conv::show(want));
    if (!type_of(bias.dtype, &p->bias_type)) return unsupported(name + ": bias must be float32, float16 or bfloat16");
    p->bias = bias.data;
    p->bias_b = c.bias_batched ? k : 0;
  }
  if (c.has_residual) {
    const Buffer& residual = in[next++];
    const std::vector<int64_t> want(y.dims.begin() + (c.y_batched && !c.residual_batched ? 1 : 0), y.dims.end());
    if (residual.dims != want)
      return bad(name + ": residual has shape " + conv::show(residual.dims) + ", expected " + conv::show(want));
    if (!type_of(residual.dtype, &p->residual_type)) return unsupported(name + ": residual must be float32, float16 or bfloat16");
    p->residual = residual.data;
    p->residual_b = c.residual_batched ? p->out.b : 0;
  }
  return ok();
}

ffi::Error run(const char* op, conv::Op kind, bool fused, cudaStream_t stream, const Buffers& in, const Buffers& out,
               const ConvConfig& c) {
  const std::string name(op);
  const size_t operands = 2 + (fused && c.has_bias ? 1 : 0) + (fused && c.has_residual ? 1 : 0);
  const bool has_workspace = out.size() == 2;
  if (in.size() != operands || (out.size() != 1 && !has_workspace))
    return bad(name + ": expected " + std::to_string(operands) + " operands and 1 result, got " + std::to_string(in.size()) + " and " +
               std::to_string(out.size()));
  if ((c.bias_batched || c.residual_batched) && !c.y_batched) return bad(name + ": a batched bias or residual needs a batched result");
  const Buffer& x = kind == conv::Op::kInputGrad ? out[0] : in[0];
  const Buffer& w = kind == conv::Op::kWeightGrad ? out[0] : in[1];
  const Buffer& y = kind == conv::Op::kForward ? out[0] : kind == conv::Op::kInputGrad ? in[0] : in[1];

  conv::Geometry geo;
  geo.lhs_spec = ints(c.lhs_spec), geo.rhs_spec = ints(c.rhs_spec), geo.out_spec = ints(c.out_spec);
  geo.strides = ints(c.strides), geo.padding_low = ints(c.padding_low);
  geo.lhs_dilation = ints(c.lhs_dilation), geo.rhs_dilation = ints(c.rhs_dilation);
  geo.flip = c.flip != 0, geo.groups = c.groups, geo.batch_groups = c.batch_groups;
  geo.x_batched = c.x_batched != 0, geo.w_batched = c.w_batched != 0, geo.y_batched = c.y_batched != 0;

  conv::Problem p;
  if (in[0].dtype != in[1].dtype) return bad(name + ": the two operands must have one element type");
  if (!type_of(in[0].dtype, &p.in_type) || !type_of(out[0].dtype, &p.out_type))
    return unsupported(name + ": the kernels take float32, float16 and bfloat16");
  const std::string reason = conv::make_problem(kind, geo, x.dims, w.dims, y.dims, &p);
  if (!reason.empty()) return bad(name + ": " + reason);
  p.tf32 = c.tf32 != 0 && p.in_type == conv::Type::kF32;
  p.in_data = in[0].data, p.w_data = in[1].data, p.out_data = out[0].data;
  if (fused) {
    ffi::Error e = add_epilogue(op, in, y, c, &p);
    if (e.failure()) return e;
  }
  if (p.empty()) return ok();  // no output; an empty sum still runs and writes zeros
  const int64_t workspace = has_workspace ? out[1].size() : 0;
  void* workspace_data = has_workspace ? out[1].data : nullptr;
  if (p.groups > 1) {
    const conv::DwPlan depthwise = conv::depthwise_plan(p, workspace);
    if (depthwise.reason == nullptr)
      return status(op, conv::depthwise_launch(p, depthwise, workspace_data, stream));
  }
  const conv::FirstPlan first = conv::first_plan(p, conv::sm90_usable(), workspace);
  if (first.reason == nullptr && conv::first_usable()) {
    const cudaError_t e = conv::first_launch(p, first, workspace_data, stream);
    if (e != cudaErrorInvalidValue) return status(op, e);
    (void)cudaGetLastError();  // more shared memory than this GPU's blocks have
  }
  conv::Config config = conv::select(p, p.in_type != conv::Type::kF32 && conv::sm90_usable(), workspace);
  if (config.kernel == conv::Kernel::kSm90) {
    const cudaError_t e = conv::sm90_launch(p, config.sm90, workspace_data, stream);
    if (e != cudaErrorInvalidValue) return status(op, e);
    (void)cudaGetLastError();  // the driver takes no tensor map of these arrays: the kernels without one do
    config = conv::select(p, false, workspace);
  }
  return status(op, conv::launch(p, config, workspace_data, stream));
}

ffi::Error run_conv(cudaStream_t s, Buffers in, Buffers out, ConvConfig c) {
  return run("conv", conv::Op::kForward, false, s, in, out, c);
}
ffi::Error run_conv_fused(cudaStream_t s, Buffers in, Buffers out, ConvConfig c) {
  return run("conv_fused", conv::Op::kForward, true, s, in, out, c);
}
ffi::Error run_conv_dx(cudaStream_t s, Buffers in, Buffers out, ConvConfig c) {
  return run("conv_dx", conv::Op::kInputGrad, false, s, in, out, c);
}
ffi::Error run_conv_dw(cudaStream_t s, Buffers in, Buffers out, ConvConfig c) {
  return run("conv_dw", conv::Op::kWeightGrad, false, s, in, out, c);
}

}  // namespace
}  // namespace jaxprims

JAXPRIMS_HANDLER(conv, ::jaxprims::ConvConfig, ::jaxprims::run_conv);
JAXPRIMS_HANDLER(conv_fused, ::jaxprims::ConvConfig, ::jaxprims::run_conv_fused);
JAXPRIMS_HANDLER(conv_dx, ::jaxprims::ConvConfig, ::jaxprims::run_conv_dx);
JAXPRIMS_HANDLER(conv_dw, ::jaxprims::ConvConfig, ::jaxprims::run_conv_dw);
