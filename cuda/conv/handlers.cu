// Convolution's four custom calls: buffers and options become a Problem, which convolve.h takes.
//   conv (x, w) -> y;  conv_fused (x, w[, bias][, residual]) -> y;  conv_dx (dy, w) -> dx;  conv_dw (x, dy) -> dw; a workspace may follow
#include "common/act.cuh"
#include "conv/convolve.h"
#include "conv/params.h"

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

// Fills *problem, or says what does not fit.
ffi::Error prepare(const char* op, conv::Op kind, bool fused, const Buffers& in, const Buffers& out, const ConvConfig& c,
                   conv::Problem* problem) {
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

  conv::Problem& p = *problem;
  if (in[0].dtype != in[1].dtype) return bad(name + ": the two operands must have one element type");
  if (!type_of(in[0].dtype, &p.in_type) || !type_of(out[0].dtype, &p.out_type))
    return unsupported(name + ": the kernels take float32, float16 and bfloat16");
  const std::string reason = conv::make_problem(kind, geo, x.dims, w.dims, y.dims, &p);
  if (!reason.empty()) return bad(name + ": " + reason);
  if (c.algorithm < 0 || c.algorithm > 3) return bad(name + ": unknown algorithm " + std::to_string(c.algorithm));
  p.algorithm = static_cast<conv::Algorithm>(c.algorithm);
  p.tf32 = c.tf32 != 0 && p.in_type == conv::Type::kF32;
  p.in_data = in[0].data, p.w_data = in[1].data, p.out_data = out[0].data;
  return fused ? add_epilogue(op, in, y, c, &p) : ok();
}

ffi::Error run(const char* op, conv::Op kind, bool fused, cudaStream_t stream, const Buffers& in, const Buffers& out,
               const ConvConfig& c) {
  conv::Problem p;
  ffi::Error e = prepare(op, kind, fused, in, out, c, &p);
  if (e.failure() || p.empty()) return e;  // no output; an empty sum still runs and writes zeros
  const bool has_workspace = out.size() == 2;
  return status(op, conv::convolve(p, has_workspace ? out[1].data : nullptr, has_workspace ? out[1].size() : 0, stream));
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

struct Reader {  // of a list of ints
  const int64_t* v;
  int64_t left;
  int64_t one() { return left > 0 ? (--left, *v++) : 0; }
  Ints list() {
    const int64_t n = one(), take = n < 0 ? 0 : n < left ? n : left;
    const Ints span(v, static_cast<size_t>(take));
    v += take, left -= take;
    return span;
  }
  Buffer buffer() {  // the type's code in problem.h, and the extents
    constexpr ffi::DataType kTypes[] = {ffi::DataType::F32, ffi::DataType::F16, ffi::DataType::BF16};
    Buffer b;
    const int64_t type = one();
    b.dtype = type >= 0 && type < 3 ? kTypes[type] : ffi::DataType::INVALID;
    const Ints dims = list();
    b.dims.assign(dims.begin(), dims.end());
    return b;
  }
};

}  // namespace

// What choose.h says of a call, in words: jaxprims/conv/choice.py writes the list of ints. `hopper`: kernels for sm_90a may be chosen.
std::string conv_choice(const int64_t* values, int64_t count, bool hopper) {
  Reader r{values, count};
  const int64_t op = r.one(), fused = r.one(), workspace = r.one();
  ConvConfig c;
  for (Ints* field : {&c.lhs_spec, &c.rhs_spec, &c.out_spec, &c.strides, &c.padding_low, &c.lhs_dilation, &c.rhs_dilation}) *field = r.list();
  for (int64_t* field : {&c.flip, &c.groups, &c.batch_groups, &c.x_batched, &c.w_batched, &c.y_batched, &c.activation, &c.has_bias,
                         &c.has_residual, &c.bias_batched, &c.residual_batched, &c.algorithm, &c.tf32})
    *field = r.one();
  Buffers in, out;
  for (int64_t n = r.one(); n > 0 && r.left > 0; --n) in.push_back(r.buffer());
  out.push_back(r.buffer());
  if (op < 0 || op > 2 || in.size() < 2) return "";
  conv::Problem p;
  const ffi::Error e = prepare("conv", static_cast<conv::Op>(op), fused != 0, in, out, c, &p);
  return e.failure() || p.empty() ? "" : describe(choose(p, hopper, workspace));
}

}  // namespace jaxprims

extern "C" __attribute__((visibility("default"))) const char* jaxprims_conv_choice(const int64_t* values, int64_t count, int hopper) {
  static thread_local std::string text;
  text = jaxprims::conv_choice(values, count, hopper != 0);
  return text.c_str();
}

JAXPRIMS_HANDLER(conv, ::jaxprims::ConvConfig, ::jaxprims::run_conv);
JAXPRIMS_HANDLER(conv_fused, ::jaxprims::ConvConfig, ::jaxprims::run_conv_fused);
JAXPRIMS_HANDLER(conv_dx, ::jaxprims::ConvConfig, ::jaxprims::run_conv_dx);
JAXPRIMS_HANDLER(conv_dw, ::jaxprims::ConvConfig, ::jaxprims::run_conv_dw);
