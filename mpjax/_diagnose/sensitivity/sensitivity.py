"""`mpjax.sensitivity`: the error that each rounding causes in the result of a function."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxValueError, check_call
from mpjax._core.types import Args, Function, Kwargs, P
from mpjax._core.wrappers import name_of
from mpjax._diagnose.call import Call, has_backward_pass
from mpjax._diagnose.expectations import check_float32, lows_of
from mpjax._diagnose.gradient import gradient_of, positions_of_gradients
from mpjax._diagnose.matmul_formats import WIDE_FORMATS, format_of_matmul
from mpjax._diagnose.module_names import with_models_under
from mpjax._diagnose.optimizer_work import optimizer_of
from mpjax._diagnose.parameter_scopes import name_by_parameters
from mpjax._diagnose.ranges.ranges import scale_for_float16
from mpjax._diagnose.report import Advance, Pending
from mpjax._diagnose.sensitivity.errors import Errors, before_nonfinite, errors_of
from mpjax._diagnose.sensitivity.report import (
  THRESHOLD,
  DecisionRow,
  RoundingRow,
  SensitivityReport,
)
from mpjax._diagnose.sensitivity.roundings import Rounding
from mpjax._diagnose.suggested_changes import Cure, cures_of
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import Step, body_of
from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.policy import PolicyLike, parse_policy

CALL = "mpjax.sensitivity(fn)"
_FIX = "Write mpjax.sensitivity(loss_fn)(params, batch), with a function and then its arguments."

_ROUNDS = 4
"""The most times that the cures are looked for: a cure may move a rounding to another line."""


@check_call(CALL, fix=_FIX)
def sensitivity(
  fn: Callable[P, object], policy: PolicyLike | None = None
) -> Callable[P, SensitivityReport]:
  """Measure the error that each rounding to low precision causes in the result of a function.

  The report predicts the relative error of the result: of its gradient, if the function is a loss,
  and of the update, if it is a training step. It lists the roundings by their contribution. The
  amplification of a rounding is its contribution over the error of one rounding. It is about 1 in
  healthy programs, and 10 to 10^6 where numbers cancel or where a rounded number is a large angle.
  If it is above 8, or if a value overflows, the report names the change that cures it, and the
  error that remains with all cures.

  The function is traced under its policy, but it runs in float32, with a backward pass for each of
  4 random projections of the result, or of 12 if the prediction differs from the measured error.
  docs/sensitivity.md describes the method and its cost. The idea is that of error estimation by
  adjoints, as in CHEF-FP (Vassilev et al., 2022).

  Args:
    fn: a model, a loss, a gradient or a training step, jitted or not, under a policy unless
      `policy` is passed. A loss returns a scalar, or one and aux. It is differentiated by its first
      argument.
    policy: the policy for a function that has none. Flax models run under it as with
      `mpjax.with_policy`, and other functions as with `mpjax.autocast`.

  Returns:
    A function with the arguments of `fn`, which must be concrete arrays. It returns a report: print
    it, show it in a notebook, or read `.predicted`, `.measured`, `.roundings` and `.cures`.

  Raises:
    MpjaxTypeError: `fn` is no function; when called: an argument is traced.
    MpjaxValueError: the policy is unknown. When called: nothing is in low precision, the function
      has a policy and gets another, its results are not finite in float32, or its result has no
      floating number other than zero.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):  # The angle is about 100.
  ...   return jnp.sum(jnp.sin(30 * (x @ w)))
  >>> w, x = jnp.arange(64.0).reshape(8, 8) / 64, jnp.ones((4, 8)) + jnp.arange(8) / 9
  >>> report = mpjax.sensitivity(mpjax.autocast(loss_fn))(w, x)
  >>> report.roundings[0].operation, report.roundings[0].amplification > 8
  ('dot_general', True)
  """
  parsed = None if policy is None else parse_policy(policy, "mpjax.sensitivity(policy)")

  def report(fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> SensitivityReport:
    call = Call(args, kwargs, CALL)
    call.check_concrete()
    name = name_of(fn)
    if parsed is not None:
      check_float32(Graph(call.traced(fn).program), f"{CALL}(*args)", "function")
      plain, fn = fn, with_models_under(fn, parsed, ())
      if not lows_of(Graph(call.traced(fn).program)):
        fn = autocast(plain, parsed)
    program, counted, kind = _traced(fn, call, args, kwargs, advance)
    graph = Graph(program)
    owners = [one.module if one.is_first else () for one in call.arguments(fn)]
    named = name_by_parameters(graph, owners)

    def paths(step: Step) -> str:
      return step.location.path or "/".join(named.get(step.key, ()))

    errors, cures, cured = _with_cures(program, call, counted, paths, advance)
    # The FLOPs of matmuls in low precision, and those that cures move to float32.
    low_flops, moved_flops = 0, 0
    for matmul, dtype, flops in graph.matmuls():
      if format_of_matmul(matmul, dtype) not in WIDE_FORMATS:
        low_flops += flops
        moved_flops += flops if any(each.covers(matmul.step) for each in cures) else 0
    return SensitivityReport(
      name=name,
      of=kind,
      predicted=errors.predicted,
      measured=errors.measured,
      by_decisions=errors.by_decisions,
      roundings=tuple(
        row._replace(cure=next((each.code for each in cures if each.covers(group[0].step)), ""))
        for row, group in _grouped(errors.roundings, paths)
      ),
      decisions=tuple(
        DecisionRow(paths(each.step), each.step.location.source, _name(each.step), each.share)
        for each in errors.decisions
      ),
      cures=tuple(dict.fromkeys(each.code for each in cures)),
      predicted_with_cures=cured.predicted,
      measured_with_cures=cured.measured,
      cured_share=moved_flops / low_flops if low_flops else 0.0,
      not_followed=tuple(
        DecisionRow(paths(each), each.location.source, _name(each)) for each in errors.not_followed
      ),
      exact=tuple(errors.results),
    )

  return Pending(CALL, fn, report, _FIX)


def _traced(
  fn: Function, call: Call, args: Args, kwargs: Kwargs, advance: Advance
) -> tuple[ClosedJaxpr, Mapping[int, int | None], str]:
  """Returns the program whose result counts, which results do, and what they are.

  See `errors_of` for the second. A loss is differentiated.
  """
  record = AuditRecord(shows_roundings=True)
  with AUDIT(record):
    traced = call.traced(fn)
  # Steps whose results nothing reads do not run.
  lows = lows_of(Graph(body_of(traced.program, compiled=True)))
  # A policy may keep all of a function in float32. Without a policy, nobody asked for less.
  if not lows and "autocast" not in record.uses and not record.modules:
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a function that computes in low precision",
      got="one without a value in bfloat16, float16 or float8",
      fix='Pass the policy: mpjax.sensitivity(fn, policy="mixed_bfloat16")(*args).',
    )
  if args and traced.is_loss:
    # Without a scale, the gradients of float16 would underflow.
    has_float16 = any(v.dtype == jnp.float16 for v in lows)
    scale = scale_for_float16(fn, args, kwargs, advance) if has_float16 else 1.0
    with AUDIT(record):
      traced = call.traced(gradient_of(fn, scale))
    counted = dict.fromkeys(positions_of_gradients(traced))
    kind = "gradient"
  else:
    counted = dict[int, int | None]()
    # A step has a gradient inside. A residual model, which adds to its argument, has none.
    if has_backward_pass(traced.program):
      # Averages, such as the moments of Adam, have other scales than parameters, so a norm of all
      # together would show the errors of the largest alone.
      graph = Graph(traced.program)
      additions = optimizer_of(graph, call.arguments(fn), traced.outputs).additions
      counted = {each.result: graph.arguments.index(each.old) for each in additions}
    kind = "update" if counted else "result"
    counted = counted or dict.fromkeys(range(len(traced.outputs)))
  types = [aval.dtype for aval in traced.program.out_avals]
  counted = {i: j for i, j in counted.items() if jnp.issubdtype(types[i], jnp.inexact)}
  return traced.program, counted, kind


def _with_cures(
  program: ClosedJaxpr,
  call: Call,
  counted: Mapping[int, int | None],
  paths: Callable[[Step], str],
  advance: Advance,
) -> tuple[Errors, list[Cure], Errors]:
  """Returns the errors of a program, the changes to make, and the errors with them."""
  operands = [*map(jnp.asarray, call.arrays)]
  every_step = [*body_of(program, compiled=True).every_step()]
  culprits: list[Step] = []
  cures: list[Cure] = []

  def is_cured(step: Step) -> bool:
    return any(each.covers(step) for each in cures)

  first = errors = errors_of(program, operands, counted)
  if not all(np.all(np.isfinite(x)) for x in errors.results):
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a function whose results are finite in float32",
      got="inf or NaN without any rounding",
      fix="Find where it comes from: print(mpjax.find_nonfinite(fn)(*args)).",
    )
  # Some results are zero, and some functions return integers or nothing.
  if math.isnan(errors.predicted):
    raise MpjaxValueError(
      f"{CALL}(*args)",
      expected="a function with a floating result, or an update, that is not zero",
      got="only zeros" if any(x.size for x in errors.results) else "no floating result",
      fix="Return the numbers that integers are computed from. A loss takes the parameters first.",
    )
  for done in range(_ROUNDS):
    advance(done + 1, _ROUNDS + 1)
    steps = [
      each.step
      for row, group in _grouped(errors.roundings, paths)
      if row.overflows or row.amplification > THRESHOLD
      for each in group
    ]
    if not math.isfinite(errors.measured):
      steps += before_nonfinite(program, operands, is_cured)
    new = [step for step in steps if not is_cured(step)]
    if not new:
      break
    culprits += new
    cures[:] = cures_of(culprits, every_step)
    errors = errors_of(program, operands, counted, is_cured)
  return first, cures, errors


def _name(step: Step) -> str:
  return step.eqn.primitive.name


def _grouped(
  roundings: Sequence[Rounding], paths: Callable[[Step], str]
) -> list[tuple[RoundingRow, list[Rounding]]]:
  """Returns the rows of the report, and the roundings of each.

  A row is for one kind of operation, of a line and a module. Overflows come first, then the largest
  contributions.
  """
  groups: dict[RoundingRow, list[Rounding]] = {}
  for each in roundings:
    row = RoundingRow(
      path=paths(each.step),
      source=each.step.location.source,
      operation=_name(each.step),
      direction=each.step.location.direction,
      dtype=each.format.name,
    )
    groups.setdefault(row, []).append(each)
  rows = [
    row._replace(
      contribution=math.hypot(*(each.contribution for each in group)),
      amplification=math.hypot(*(each.amplification for each in group)),
      overflows=any(each.overflows for each in group),
    )
    for row, group in groups.items()
  ]
  found = [*zip(rows, groups.values(), strict=True)]
  return sorted(found, key=lambda pair: (not pair[0].overflows, -pair[0].contribution))
