// From XLA's buffers to a norm's Problem, and the order of the launches. Operands and results name their axes in the config;
// sizes are read from the buffers, so one config serves any (sharded, symbolic) batch.
#include "common/team.cuh"
#include "norm/fast.h"
#include "norm/problem.h"

namespace jaxprims {
namespace norm {
namespace {

struct Call {
  Problem p;
  ffi::DataType dtype = ffi::DataType::INVALID;
  std::vector<int64_t> dims;
  std::vector<char> kept;                        // the axes of a statistic
  std::vector<char> has[kNames];                 // the axes of each array
  Value* workspace = nullptr;
  int64_t room = 0;
};

// Walks (name, count, axes...) lists: f(name, axes, position).
template <class F>
bool each_term(Ints terms, int64_t rank, F&& f) {
  size_t at = 0, position = 0;
  while (at + 1 < terms.size()) {
    const int64_t name = terms[at], count = terms[at + 1];
    if (name < 0 || name >= kNames || count < 0 || count > rank || at + 2 + count > terms.size()) return false;
    std::vector<int64_t> axes(terms.begin() + at + 2, terms.begin() + at + 2 + count);
    for (int64_t a : axes)
      if (a < 0 || a >= rank) return false;
    if (!f(static_cast<Name>(name), axes, position++)) return false;
    at += 2 + count;
  }
  return true;
}

ffi::Error prepare(const std::string& op, const Buffers& in, const Buffers& out, const NormConfig& c, Call& call) {
  call.dims.assign(c.rank, 1);
  call.kept.assign(c.rank, 1);
  for (int64_t a : c.reduce) {
    if (a < 0 || a >= c.rank) return bad(op + ": the config reduces an axis that is not there");
    call.kept[a] = 0;
  }
  if (c.activation < 0 || c.activation >= kActCount) return bad(op + ": unknown activation code");
  size_t operands = 0, results = 0;
  auto place = [&](const Buffers& buffers, size_t& count) {
    return [&](Name name, const std::vector<int64_t>& axes, size_t position) {
      if (position >= buffers.size() || buffers[position].rank() != static_cast<int>(axes.size())) return false;
      const Buffer& b = buffers[position];
      call.has[name].assign(c.rank, 0);
      for (size_t k = 0; k < axes.size(); ++k) {
        call.has[name][axes[k]] = 1;
        int64_t& d = call.dims[axes[k]];
        if (d != 1 && d != b.dims[k]) return false;
        d = b.dims[k];
      }
      call.p.a[name].data = b.data;
      count = position + 1;
      return true;
    };
  };
  if (!each_term(c.operands, c.rank, place(in, operands)) || !each_term(c.results, c.rank, place(out, results)) ||
      operands != in.size() || out.size() > results + 1 || out.size() < results)
    return bad(op + ": operands or results do not fit the config");

  if (call.has[kX].empty()) return bad(op + ": no x");
  each_term(c.operands, c.rank, [&](Name name, const std::vector<int64_t>&, size_t at) {
    if (name == kX) call.dtype = in[at].dtype;
    return true;
  });
  std::string wrong;
  auto type = [&](const Buffers& buffers) {
    return [&](Name name, const std::vector<int64_t>&, size_t at) {
      const ffi::DataType t = buffers[at].dtype;
      if (name == kMask && t != ffi::DataType::PRED) wrong = "mask must be bool";
      if (name != kMask && t != call.dtype && t != ffi::DataType::F32) wrong = "an array is neither of x's dtype nor float32";
      call.p.a[name].type = t == ffi::DataType::PRED ? Type::kBool : t == call.dtype ? Type::kSame : Type::kFloat;
      return true;
    };
  };
  each_term(c.operands, c.rank, type(in));
  each_term(c.results, c.rank, type(out));
  if (!wrong.empty()) return unsupported(op + ": " + wrong);

  Problem& p = call.p;
  p.total = 1;
  for (int64_t d : call.dims) p.total *= d;
  p.wide = p.total >= (int64_t{1} << 31);
  p.rms = c.rms != 0;
  p.fixed = c.fixed != 0;
  p.act = static_cast<Act>(c.activation);
  p.eps = static_cast<float>(c.eps);
  for (int n = 0; n < kNames; ++n)
    if (p.a[n].here() && !make_runs(call.dims, call.has[n], p.a[n].runs))
      return unsupported(op + ": an array lies over more than two runs of axes");
  if (out.size() == results + 1) {
    call.workspace = out.back().as<Value>();
    call.room = out.back().size() / static_cast<int64_t>(sizeof(Value));
  }
  return ok();
}

// Sets up the reduction whose statistics keep the axes `kept`.
bool reduce_to(Call& call, Problem& p, const std::vector<char>& kept) {
  if (!make_view(call.dims, kept, p.view) || !make_runs(call.dims, kept, p.by_stat)) return false;
  p.plan = make_plan(p.view, call.room);
  p.partial = p.totals = nullptr;
  if (p.plan.chunks > 1) {
    p.partial = call.workspace;
    p.totals = call.workspace + p.plan.chunks * p.view.statistics();
  }
  return true;
}

ffi::Error zeros(const char* op, const Buffers& out, cudaStream_t stream) {
  for (const Buffer& b : out) {
    const size_t bytes = b.size() * ffi::ByteWidth(b.dtype);
    if (bytes == 0) continue;
    const cudaError_t e = cudaMemsetAsync(b.data, 0, bytes, stream);
    if (e != cudaSuccess) return status(op, e);
  }
  return ok();
}

ffi::Error no_view(const char* op) { return unsupported(std::string(op) + ": the reduced axes do not form two runs"); }

// --- the vector kernels -----------------------------------------------------------------------------------------------------

int vector_of(ffi::DataType t) { return t == ffi::DataType::F32 ? 4 : 8; }

// What is common: no mask, an activation that is inlined, every array in x's dtype that is of the whole index space.
bool elements_fit(const Problem& p) {
  if (p.a[kMask].here() || !act_inlined(p.act) || !p.a[kX].here()) return false;
  for (int n = 0; n < kNames; ++n) {
    const Array& a = p.a[n];
    if (!a.here()) continue;
    const bool whole = n == kX || n == kResidual || n == kDy || n == kY || n == kDx || n == kDresidual;
    if (whole && (a.type != Type::kSame || a.runs.mode != Runs::kSame)) return false;
  }
  return true;
}

// And all of them (parameters too, which may be read as vectors) at multiples of 16 bytes.
bool aligned(const Problem& p) {
  for (const Array& a : p.a)
    if (a.here() && reinterpret_cast<uintptr_t>(a.data) % 16 != 0) return false;
  return true;
}
bool vectors_fit(const Problem& p) { return elements_fit(p) && aligned(p); }

// How a parameter lies along rows; false where no vector of it is one load or one value.
bool row_term(const Array& a, int64_t length, int vec, RowTerm& t) {
  t = {};
  if (!a.here()) return true;
  const Along along = along_row(a.runs, length);
  if (!along.ok) return false;
  t.kind = along.step == 0 ? 3 : along.step == 1 ? 1 : 2;
  if (t.kind != 2) return true;
  t.by = FastDiv(static_cast<uint32_t>(along.step));
  return along.step % vec == 0;
}

bool row_terms(const Problem& p, int vec, RowPlan& q) {
  for (const Name n : {kMean, kVar, kLow, kCmean, kCvar})
    if (p.a[n].here()) {
      const Along along = along_row(p.a[n].runs, q.length);
      if (!along.ok || along.step != 0) return false;
    }
  if (!row_term(p.a[kScale], q.length, vec, q.scale) || !row_term(p.a[kBias], q.length, vec, q.bias)) return false;
  q.direct = true;
  for (const Name n : {kMean, kVar, kLow, kCount, kCmean, kCvar})
    if (p.a[n].here() && !one_a_row(p.a[n].runs, q.rows, q.length)) q.direct = false;
  const auto shared = [&](const Array& a, const RowTerm& t) { return t.kind == 0 || (t.kind == 1 && same_for_rows(a.runs, q.rows, q.length)); };
  q.plain = shared(p.a[kScale], q.scale) && shared(p.a[kBias], q.bias) && !p.a[kResidual].here() && p.act == Act::kNone;
  return true;
}

// All statistics are float32.
bool float_stats(const Problem& p, ffi::DataType dtype) {
  for (const Name n : {kMean, kVar, kLow, kCount})
    if (p.a[n].here() && p.a[n].type != Type::kFloat && dtype != ffi::DataType::F32) return false;
  return true;
}

// Rows of consecutive elements.
bool is_rows(const Problem& p) { return p.view.r0 == 1; }

bool columns_fit(const Problem& p, const ColumnPlan& q) {
  for (const Name n : {kMean, kVar, kLow, kCmean, kCvar})  // in the statistics' own order
    if (p.a[n].here() && !same_runs(p.a[n].runs, p.by_stat)) return false;
  for (const Name n : {kMean, kVar, kLow, kScale, kBias, kCmean, kCvar, kDscale, kDbias})
    if (p.a[n].here() && !same_in_rows(p.a[n].runs, q.rows, q.width)) return false;
  return true;
}

constexpr int64_t kColumnsLeast = 1 << 15;  // elements: below, one kernel of one launch is as quick as three

// Columns of a thread: one where rows are not of whole vectors.
int columns_vector(const Call& call) {
  const int vec = vector_of(call.dtype);
  return aligned(call.p) && call.p.view.s1 * call.p.view.r1 % vec == 0 ? vec : 1;
}

// Moments by columns, and y behind them where it is wanted; false: not taken.
bool by_columns(Call& call, bool then, cudaStream_t stream, cudaError_t& e) {
  Problem& p = call.p;
  if (p.total < kColumnsLeast || call.workspace == nullptr || is_rows(p) || !elements_fit(p)) return false;
  const int vec = columns_vector(call);
  const ColumnPlan q = column_plan(p.view, vec, (vec == 1 ? 4 : 3) * kProcessors, call.room);
  if (!q.ok || !columns_fit(p, q)) return false;
  e = columns_moments(call.dtype, p, q, call.workspace, stream);
  if (e == cudaSuccess && then) e = columns_forward(call.dtype, p, column_plan(p.view, vec, (vec == 1 ? 4 : 6) * kProcessors, INT64_MAX), stream);
  return true;
}

bool forward_fast(Call& call, cudaStream_t stream, cudaError_t& e) {
  Problem& p = call.p;
  if (!is_rows(p)) return by_columns(call, true, stream, e);
  if (!vectors_fit(p)) return false;
  const int vec = vector_of(call.dtype);
  RowPlan q = row_plain_plan(p.view.statistics(), p.view.r1, vec, team::clusters_usable());
  if (q.ok && row_terms(p, vec, q) && q.plain && q.direct && float_stats(p, call.dtype)) {
    e = rows_plain(call.dtype, p, q, stream);
    return true;
  }
  q = row_forward_plan(p.view.statistics(), p.view.r1, vec, team::clusters_usable());
  if (q.ok) {
    if (!row_terms(p, vec, q)) return false;
    e = rows_forward(call.dtype, p, q, stream);
    return true;
  }
  q = row_odd_plan(p.view.statistics(), p.view.r1, vec, false, false, 0);
  if (p.view.r1 % vec == 0) return false;
  if (!q.ok || !row_terms(p, 1, q) || !q.plain) return false;
  e = rows_odd_forward(call.dtype, p, q, stream);
  return true;
}

// y from given statistics, where these are columns'.
bool apply_fast(Call& call, cudaStream_t stream, cudaError_t& e) {
  Problem& p = call.p;
  if (p.total < kColumnsLeast || !make_view(call.dims, call.kept, p.view) ||
      !make_runs(call.dims, call.kept, p.by_stat) || is_rows(p) || !elements_fit(p) || !p.a[kY].here()) return false;
  const int vec = columns_vector(call);
  const ColumnPlan q = column_plan(p.view, vec, (vec == 1 ? 4 : 6) * kProcessors, INT64_MAX);
  if (!q.ok || !columns_fit(p, q)) return false;
  e = columns_forward(call.dtype, p, q, stream);
  return true;
}

// How a parameter gradient lies over columns: 1 one per column, 2 one per outer and column, 0 otherwise.
int column_sums(const Array& a, const ColumnPlan& q) {
  const Runs& r = a.runs;
  if (r.mode == Runs::kOne && r.inner_post.d == 1 && r.inner.d == q.width) return 1;
  if (r.mode == Runs::kTwo && r.inner_post.d == 1 && r.inner.d == q.width && r.outer_post.d == q.rows * q.width && r.outer.d == q.outer)
    return 2;
  return 0;
}

// The same of both gradients, where they agree.
int gradients(const Problem& p, const ColumnPlan& q) {
  const int one = column_sums(p.a[kDscale], q), two = column_sums(p.a[kDbias], q);
  return !p.a[kDbias].here() ? one : !p.a[kDscale].here() || one == two ? two : 0;
}

// dx, dresidual and, where they are reductions of the same pass, dscale and dbias; `params` tells whether these are done.
bool backward_fast(Call& call, bool& params, cudaStream_t stream, cudaError_t& e) {
  Problem& p = call.p;
  params = false;
  if (p.fixed || !p.a[kDx].here() || !p.a[kDy].here() || p.a[kDmean].here() || p.a[kDvar].here() || !elements_fit(p)) return false;
  const bool wanted = p.a[kDscale].here() || p.a[kDbias].here();
  if (is_rows(p)) {
    if (!aligned(p)) return false;
    const int vec = vector_of(call.dtype);
    bool sums = wanted;
    for (const Name n : {kDscale, kDbias}) {
      const Runs& r = p.a[n].runs;
      if (p.a[n].here() && !(r.mode == Runs::kOne && r.inner_post.d == 1 && r.inner.d == p.view.r1)) sums = false;
    }
    float* const partial = reinterpret_cast<float*>(call.workspace);
    const int64_t room = call.workspace == nullptr ? 0 : call.room * static_cast<int64_t>(sizeof(Value) / sizeof(float));
    const int64_t rows = p.view.statistics(), length = p.view.r1;
    const bool odd = length % vec != 0;
    RowPlan terms;
    terms.rows = rows, terms.length = static_cast<int>(length);
    if (length >= (int64_t{1} << 30) || !row_terms(p, odd ? 1 : vec, terms)) return false;
    for (const Name n : {kCmean, kCvar, kDresidual})
      if (p.a[n].here() && (n == kDresidual || !odd)) terms.plain = false;
    if (odd && !terms.plain) return false;
    if (!odd && !(terms.direct && float_stats(p, call.dtype))) terms.plain = false;
    const auto plan = [&](bool with_sums) {
      return odd ? row_odd_plan(rows, length, vec, true, with_sums, room)
                 : row_backward_plan(rows, length, vec, terms.plain, with_sums, with_sums ? room : 0, team::clusters_usable());
    };
    RowPlan q = plan(sums);
    if (!q.ok && sums) sums = false, q = plan(false);
    if (!q.ok) return false;
    q.scale = terms.scale, q.bias = terms.bias, q.plain = terms.plain, q.direct = terms.direct;
    e = odd ? rows_odd_backward(call.dtype, p, q, partial, sums, stream) : rows_backward(call.dtype, p, q, partial, sums, stream);
    params = sums;
    return true;
  }
  if (p.total < kColumnsLeast || call.workspace == nullptr) return false;
  const int vec = columns_vector(call);
  const int64_t stats = p.view.statistics();  // their totals lie first
  const ColumnPlan q = column_plan(p.view, vec, (vec == 1 ? 4 : 2) * kProcessors, 2 * (call.room - stats));
  if (call.room <= stats || !q.ok || !columns_fit(p, q)) return false;
  const int each = wanted ? gradients(p, q) : 0;
  Value* const totals = call.workspace;
  e = columns_sums(call.dtype, p, q, reinterpret_cast<float2*>(totals + stats), totals, each, stream);
  if (e == cudaSuccess)
    e = columns_backward(call.dtype, p, column_plan(p.view, vec, (vec == 1 ? 4 : 8) * kProcessors, INT64_MAX), totals, stream);
  params = each != 0;
  return true;
}

#define NORM_PREPARE(op)                                       \
  Call call;                                                   \
  if (auto e = prepare(op, in, out, c, call); e.failure()) return e; \
  if (call.p.total == 0) return zeros(op, out, stream);        \
  Problem& p = call.p

ffi::Error run_norm(cudaStream_t stream, const Buffers& in, const Buffers& out, const NormConfig& c) {
  NORM_PREPARE("norm");
  if (!p.a[kVar].here() || !p.a[kY].here()) return bad("norm: y and var are results");
  if (!reduce_to(call, p, call.kept)) return no_view("norm");
  if (cudaError_t e; forward_fast(call, stream, e)) return status("norm", e);
  p.totals = p.plan.chunks > 1 ? p.totals : nullptr;
  return status("norm", forward(call.dtype, p, true, stream));
}

ffi::Error run_stats(cudaStream_t stream, const Buffers& in, const Buffers& out, const NormConfig& c) {
  NORM_PREPARE("norm_stats");
  if (!reduce_to(call, p, call.kept)) return no_view("norm_stats");
  if (cudaError_t e; by_columns(call, false, stream, e)) return status("norm_stats", e);
  return status("norm_stats", forward(call.dtype, p, false, stream));
}

ffi::Error run_apply(cudaStream_t stream, const Buffers& in, const Buffers& out, const NormConfig& c) {
  NORM_PREPARE("norm_apply");
  if (!p.a[kVar].here()) return bad("norm_apply: var is an operand");
  if (cudaError_t e; apply_fast(call, stream, e)) return status("norm_apply", e);
  return status("norm_apply", forward_apply(call.dtype, p, stream));
}

ffi::Error run_jvp(cudaStream_t stream, const Buffers& in, const Buffers& out, const NormConfig& c) {
  NORM_PREPARE("norm_jvp");
  if (!p.a[kVar].here() || !p.a[kYd].here()) return bad("norm_jvp: var and yd are needed");
  if (!p.fixed && p.a[kXd].here()) {
    if (!reduce_to(call, p, call.kept)) return no_view("norm_jvp");
    return status("norm_jvp", tangent(call.dtype, p, stream));
  }
  if (p.a[kTmean].here())
    if (auto e = zeros("norm_jvp", out, stream); e.failure()) return e;  // tmean and tvar of a constant x
  return status("norm_jvp", tangent_apply(call.dtype, p, stream));
}

ffi::Error run_bwd(cudaStream_t stream, const Buffers& in, const Buffers& out, const NormConfig& c) {
  NORM_PREPARE("norm_bwd");
  if (!p.a[kVar].here() || !p.a[kDy].here()) return bad("norm_bwd: var and dy are needed");
  bool params = false;
  if (p.a[kDx].here() && !p.fixed) {
    if (!reduce_to(call, p, call.kept)) return no_view("norm_bwd");
    cudaError_t e;
    if (backward_fast(call, params, stream, e)) {
      if (e != cudaSuccess) return status("norm_bwd", e);
    } else if (e = backward(call.dtype, p, Gather::kBackward, true, stream); e != cudaSuccess) {
      return status("norm_bwd", e);
    }
  } else if (p.a[kDx].here() || p.a[kDresidual].here()) {
    const cudaError_t e = backward_apply(call.dtype, p, stream);
    if (e != cudaSuccess) return status("norm_bwd", e);
  }
  // Pairs that one reduction gives where their axes agree.
  const struct { Name first, second; Gather gather; } pairs[] = {{kDscale, kDbias, Gather::kParam}, {kDmean, kDvar, Gather::kFixed}};
  for (const auto& pair : pairs) {
    if (params && pair.gather == Gather::kParam) continue;
    const bool one = p.a[pair.first].here(), two = p.a[pair.second].here();
    const bool together = one && two && call.has[pair.first] == call.has[pair.second];
    for (int k = 0; k < 2; ++k) {
      const Name name = k == 0 ? pair.first : pair.second, other = k == 0 ? pair.second : pair.first;
      if (!p.a[name].here() || (k == 1 && together)) continue;
      Problem q = p;
      if (!together) q.a[other] = Array{};
      if (!reduce_to(call, q, call.has[name])) return no_view("norm_bwd");
      const cudaError_t e = backward(call.dtype, q, pair.gather, false, stream);
      if (e != cudaSuccess) return status("norm_bwd", e);
    }
  }
  return ok();
}

// --- local response normalisation ------------------------------------------------------------------------------------------

ffi::Error lrn_shape(const char* op, const Buffers& in, const Buffers& out, const LrnConfig& c, size_t operands, LrnShape& s) {
  if (in.size() != operands || out.size() != 1) return bad(std::string(op) + ": wrong number of operands or results");
  const Buffer& y = out[0];
  const int64_t axis = y.rank() - c.axis_from_end;
  if (axis < 0 || axis >= y.rank() || c.size < 1) return bad(std::string(op) + ": the config names an axis that is not there");
  s = {};
  s.outer = s.inner = 1;
  for (int64_t a = 0; a < axis; ++a) s.outer *= y.dims[a];
  for (int64_t a = axis + 1; a < y.rank(); ++a) s.inner *= y.dims[a];
  s.channels = y.dims[axis];
  s.x_period = in[0].size();
  s.d_period = in.back().size();
  s.size = static_cast<int>(c.size);
  s.alpha = static_cast<float>(c.alpha), s.beta = static_cast<float>(c.beta), s.k = static_cast<float>(c.k);
  for (const Buffer& b : in)
    if (b.dtype != y.dtype) return bad(std::string(op) + ": dtypes differ");
  return ok();
}

ffi::Error run_lrn(cudaStream_t stream, const Buffers& in, const Buffers& out, const LrnConfig& c) {
  LrnShape s;
  if (auto e = lrn_shape("lrn", in, out, c, 1, s); e.failure()) return e;
  if (out[0].size() == 0) return ok();
  return status("lrn", lrn(out[0].dtype, in[0].data, out[0].data, s, stream));
}
ffi::Error run_lrn_jvp(cudaStream_t stream, const Buffers& in, const Buffers& out, const LrnConfig& c) {
  LrnShape s;
  if (auto e = lrn_shape("lrn_jvp", in, out, c, 2, s); e.failure()) return e;
  if (out[0].size() == 0) return ok();
  return status("lrn_jvp", lrn_jvp(out[0].dtype, in[0].data, in[1].data, out[0].data, s, stream));
}
ffi::Error run_lrn_bwd(cudaStream_t stream, const Buffers& in, const Buffers& out, const LrnConfig& c) {
  LrnShape s;
  if (auto e = lrn_shape("lrn_bwd", in, out, c, 2, s); e.failure()) return e;
  if (out[0].size() == 0) return ok();
  return status("lrn_bwd", lrn_bwd(out[0].dtype, in[0].data, in[1].data, out[0].data, s, stream));
}

}  // namespace
}  // namespace norm
}  // namespace jaxprims

JAXPRIMS_HANDLER(norm, jaxprims::NormConfig, jaxprims::norm::run_norm);
JAXPRIMS_HANDLER(norm_stats, jaxprims::NormConfig, jaxprims::norm::run_stats);
JAXPRIMS_HANDLER(norm_apply, jaxprims::NormConfig, jaxprims::norm::run_apply);
JAXPRIMS_HANDLER(norm_jvp, jaxprims::NormConfig, jaxprims::norm::run_jvp);
JAXPRIMS_HANDLER(norm_bwd, jaxprims::NormConfig, jaxprims::norm::run_bwd);
JAXPRIMS_HANDLER(lrn, jaxprims::LrnConfig, jaxprims::norm::run_lrn);
JAXPRIMS_HANDLER(lrn_jvp, jaxprims::LrnConfig, jaxprims::norm::run_lrn_jvp);
JAXPRIMS_HANDLER(lrn_bwd, jaxprims::LrnConfig, jaxprims::norm::run_lrn_bwd);
