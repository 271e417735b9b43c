// softmax, log_softmax, bias_act, transpose_layout and their tangents: from buffers and config to the launchers.
#include "act/bias_act.h"
#include "act/layout.h"
#include "act/params.h"
#include "act/softmax.h"
#include "common/ffi.h"

JAXPRIMS_CONFIG(jaxprims::SoftmaxConfig, FIELD(int64_t, axis), FIELD(int64_t, axes), FIELD(int64_t, accurate),
                FIELD(int64_t, batch_axes), FIELD(int64_t, batch));
JAXPRIMS_CONFIG(jaxprims::BiasActConfig, FIELD(int64_t, activation), FIELD(int64_t, has_bias),
                FIELD(int64_t, has_residual), FIELD(int64_t, axis), FIELD(int64_t, batch_axes), FIELD(int64_t, batch));
JAXPRIMS_CONFIG(jaxprims::LayoutConfig, FIELD(int64_t, a), FIELD(int64_t, b));

namespace jaxprims {
namespace {

int64_t product(const std::vector<int64_t>& dims, int64_t from, int64_t to) {
  int64_t n = 1;
  for (int64_t i = from; i < to; ++i) n *= dims[i];
  return n;
}

// The result's leading `axes` axes as batch axes, with `core` units below them.
bool lead_of(const Buffer& out, int64_t axes, int64_t core, Lead& lead) {
  if (axes < 0 || axes > kMaxBatchAxes || axes > out.rank()) return false;
  lead.axes = static_cast<int>(axes);
  lead.core = core;
  for (int64_t k = 0; k < axes; ++k) lead.size[k] = out.dims[k];
  return true;
}

int64_t lead_units(const Lead& lead, int bit, int64_t packed, int64_t units) {
  for (int k = 0; k < lead.axes; ++k)
    if ((packed >> (4 * k + bit)) & 1) units *= lead.size[k];
  return units;
}

bool rows_of(const Buffer& out, const SoftmaxConfig& c, RowProblem& p) {
  const int64_t first = out.rank() + c.axis, last = first + c.axes;
  if (c.axes < 1 || first < c.batch_axes || last > out.rank()) return false;
  p.outer = product(out.dims, 0, first);
  p.n = product(out.dims, first, last);
  p.inner = product(out.dims, last, out.rank());
  return true;
}

ffi::Error softmax(const char* op, bool log, cudaStream_t stream, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  RowProblem p;
  if (in.size() != 1 || out.size() != 1 || in[0].dims != out[0].dims || in[0].dtype != out[0].dtype || c.batch_axes ||
      !rows_of(out[0], c, p))
    return bad(std::string(op) + ": operands and config do not fit");
  return by_dtype(op, in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    return status(op, launch_softmax(in[0].as<const T>(), out[0].as<T>(), p, log, c.accurate != 0, stream));
  });
}

ffi::Error pair(const char* name, PairOp op, cudaStream_t stream, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  RowProblem p;
  Lead lead;
  if (in.size() != 2 || out.size() != 1 || in[0].dtype != out[0].dtype || in[1].dtype != out[0].dtype ||
      !rows_of(out[0], c, p))
    return bad(std::string(name) + ": operands and config do not fit");
  const int64_t core = product(out[0].dims, c.batch_axes, out[0].rank() + c.axis);
  if (!lead_of(out[0], c.batch_axes, core, lead)) return bad(std::string(name) + ": too many batch axes");
  for (int i = 0; i < 2; ++i) {
    lead.operand(i, i, c.batch, core);
    if (in[i].size() != lead_units(lead, i, c.batch, core) * p.n * p.inner)
      return bad(std::string(name) + ": an operand's size does not fit the result");
  }
  return by_dtype(name, out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    return status(name, launch_softmax_pair(op, in[0].as<const T>(), in[1].as<const T>(), out[0].as<T>(), p, lead, stream));
  });
}

ffi::Error bias_act(const char* op, bool tangent, cudaStream_t stream, const Buffers& in, const Buffers& out, const BiasActConfig& c) {
  const size_t count = 1 + (tangent ? 1 : 0) + (c.has_bias ? 1 : 0) + (c.has_residual ? 1 : 0);
  if (in.size() != count || out.size() != 1 || c.activation < 0 || c.activation >= kActCount)
    return bad(std::string(op) + ": operands and config do not fit");
  const Buffer& y = out[0];
  const int64_t axis = y.rank() + c.axis;
  BiasActProblem p;
  p.act = static_cast<Act>(c.activation);
  p.total = y.size();
  p.channels = p.inner = 1;
  p.bias_float32 = false;
  if (!lead_of(y, c.batch_axes, product(y.dims, c.batch_axes, y.rank()), p.lead)) return bad(std::string(op) + ": too many batch axes");
  if (c.has_bias) {
    if (axis < c.batch_axes || axis >= y.rank()) return bad(std::string(op) + ": axis is out of range");
    p.channels = y.dims[axis];
    p.inner = product(y.dims, axis + 1, y.rank());
  }
  // Operands in the call's order: [t,] x [, bias] [, residual]. Roles: 0 x, 1 bias, 2 residual, 3 tangent.
  const void* data[kMaxOperands] = {};
  int position = 0;
  auto take = [&](int role) {
    const Buffer& b = in[position];
    const int64_t units = role == 1 ? p.channels : p.lead.core;
    p.lead.operand(role, position, c.batch, units);
    data[role] = b.data;
    if (role == 1 && b.dtype == ffi::DataType::F32) p.bias_float32 = true;
    const bool fits = b.size() == lead_units(p.lead, position, c.batch, units) &&
                      (b.dtype == y.dtype || (role == 1 && b.dtype == ffi::DataType::F32));
    ++position;
    return fits;
  };
  bool fits = true;
  if (tangent) fits = take(3) && fits;
  fits = take(0) && fits;
  if (c.has_bias) fits = take(1) && fits;
  if (c.has_residual) fits = take(2) && fits;
  if (!fits) return bad(std::string(op) + ": an operand's size or dtype does not fit the result");
  if (p.total == 0) return ok();
  return by_dtype(op, y.dtype, [&](auto zero) {
    using T = decltype(zero);
    return status(op, launch_bias_act(static_cast<const T*>(data[0]), data[1], static_cast<const T*>(data[2]),
                                      static_cast<const T*>(data[3]), y.as<T>(), p, stream));
  });
}

int bytes_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED: case ffi::DataType::S8: case ffi::DataType::U8: return 1;
    case ffi::DataType::S16: case ffi::DataType::U16: case ffi::DataType::F16: case ffi::DataType::BF16: return 2;
    case ffi::DataType::S32: case ffi::DataType::U32: case ffi::DataType::F32: return 4;
    case ffi::DataType::S64: case ffi::DataType::U64: case ffi::DataType::F64: case ffi::DataType::C64: return 8;
    default: return 0;
  }
}

ffi::Error run_softmax(cudaStream_t s, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  return softmax("softmax", false, s, in, out, c);
}
ffi::Error run_log_softmax(cudaStream_t s, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  return softmax("log_softmax", true, s, in, out, c);
}
ffi::Error run_softmax_jvp(cudaStream_t s, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  return pair("softmax_jvp", PairOp::kSoftmaxJvp, s, in, out, c);
}
ffi::Error run_log_softmax_jvp(cudaStream_t s, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  return pair("log_softmax_jvp", PairOp::kLogSoftmaxJvp, s, in, out, c);
}
ffi::Error run_log_softmax_bwd(cudaStream_t s, const Buffers& in, const Buffers& out, const SoftmaxConfig& c) {
  return pair("log_softmax_bwd", PairOp::kLogSoftmaxBwd, s, in, out, c);
}
ffi::Error run_bias_act(cudaStream_t s, const Buffers& in, const Buffers& out, const BiasActConfig& c) {
  return bias_act("bias_act", false, s, in, out, c);
}
ffi::Error run_bias_act_jvp(cudaStream_t s, const Buffers& in, const Buffers& out, const BiasActConfig& c) {
  return bias_act("bias_act_jvp", true, s, in, out, c);
}
ffi::Error run_transpose_layout(cudaStream_t s, const Buffers& in, const Buffers& out, const LayoutConfig& c) {
  if (in.size() != 1 || out.size() != 1 || in[0].dtype != out[0].dtype || in[0].size() != out[0].size() || c.a < 0 ||
      c.b < 0 || c.a + c.b > in[0].rank() || !bytes_of(in[0].dtype))
    return bad("transpose_layout: operands and config do not fit");
  const int64_t rank = in[0].rank();
  return status("transpose_layout",
                launch_transpose_layout(in[0].data, out[0].data, bytes_of(in[0].dtype),
                                        product(in[0].dims, 0, rank - c.a - c.b),
                                        product(in[0].dims, rank - c.a - c.b, rank - c.b),
                                        product(in[0].dims, rank - c.b, rank), s));
}

}  // namespace
}  // namespace jaxprims

JAXPRIMS_HANDLER(softmax, jaxprims::SoftmaxConfig, jaxprims::run_softmax);
JAXPRIMS_HANDLER(log_softmax, jaxprims::SoftmaxConfig, jaxprims::run_log_softmax);
JAXPRIMS_HANDLER(softmax_jvp, jaxprims::SoftmaxConfig, jaxprims::run_softmax_jvp);
JAXPRIMS_HANDLER(log_softmax_jvp, jaxprims::SoftmaxConfig, jaxprims::run_log_softmax_jvp);
JAXPRIMS_HANDLER(log_softmax_bwd, jaxprims::SoftmaxConfig, jaxprims::run_log_softmax_bwd);
JAXPRIMS_HANDLER(bias_act, jaxprims::BiasActConfig, jaxprims::run_bias_act);
JAXPRIMS_HANDLER(bias_act_jvp, jaxprims::BiasActConfig, jaxprims::run_bias_act_jvp);
JAXPRIMS_HANDLER(transpose_layout, jaxprims::LayoutConfig, jaxprims::run_transpose_layout);
