"""`tune`: the most exact format that each module needs for a tolerated error of the gradient."""

import functools
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from mpjax._core.errors import check_call, check_value
from mpjax._core.types import HALVES, Args, Function, Kwargs, P
from mpjax._debug.ranges_report import HEADROOM
from mpjax._debug.report import Advance, Pending
from mpjax._debug.tune_choices import Tuner
from mpjax._debug.tune_formats import cost_of
from mpjax._debug.tune_loss import CALL, Goal, TunedCall, prepare, reference_of
from mpjax._debug.tune_report import TuneReport
from mpjax._policy.policy import Policy, PolicyLike, parse_policy

_FIX = 'Write mpjax.tune(loss_fn, "mixed_float16", tolerance=1e-2)(params, batch).'


@check_call(CALL, fix=_FIX)
def tune(
  loss_fn: Callable[P, object],
  policy: PolicyLike | Sequence[PolicyLike] = "mixed_bfloat16",
  *,
  tolerance: float,
  headroom: float = HEADROOM,
) -> Callable[P, TuneReport]:
  """Choose the format of each module of a loss, for a tolerated error of the gradient.

  The gradient of `loss_fn` by its first argument is computed in float32, and then under the policy
  with some modules in float32. The search ends with the cheapest choice of modules whose relative
  error is within the tolerance: the norm of the difference over the norm of the gradient. Models of
  Linen, and of NNX in the arguments, run as under `mpjax.with_policy`. Other losses run as under
  `mpjax.autocast`. The largest possible number of measurements is printed first. docs/tune.md
  describes the modules and the search.

  Args:
    loss_fn: the plain loss in float32, of a Linen model, an NNX model (an argument, or merged from
      a state), or any function of trees of arrays. Returns a scalar, or one and aux. The first
      argument of a method of an NNX model is the model.
    policy: computes in bfloat16 or float16, or multiplies in a format. Of several policies, the
      first is preferred for each module, and float32 comes last.
    tolerance: the relative error of the gradient that is allowed, such as 0.01.
    headroom: how many times the float16 values may grow before they overflow. A module that leaves
      less is upgraded, even if its error is small. The default is what `mpjax.ranges` leaves for
      gradients.

  Returns:
    A function with the arguments of `loss_fn`, which must be concrete. It returns a report with
    `.policy`, `.rules`, `.error`, `.headroom` and `.half_share`. Print it: it begins with the error
    of each module.

  Raises:
    MpjaxTypeError: an argument has the wrong type. When called: an argument is traced.
    MpjaxValueError: a policy computes in float32, the tolerance is not positive, or the headroom is
      less than 1. When called: no module runs in low precision, or the loss is in low precision
      already. The loss is not finite in float32, or its gradient is zero. The gradient differs
      from call to call.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("safe"):
  ...     y = x @ w
  ...   with jax.named_scope("hot"):  # its matmul overflows float16
  ...     y = ((y * 3e3) @ w) / 3e3
  ...   return jnp.mean(y**2)
  >>> w, x = 9 * jnp.eye(8), 3 + jnp.arange(16.0).reshape(2, 8) / 16
  >>> report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(w, x)
  tune: 3 modules, at most 18 measurements
  >>> report.rules
  (mpjax.Rule("float32_highest", path="**/hot"),)
  >>> report.headroom > 8
  True
  """
  policies = _parse_policies(policy)
  check_value(
    tolerance,
    _is_number(tolerance) and 0 < tolerance < math.inf,
    "mpjax.tune(tolerance)",
    expected="a positive number, the relative error of the gradient",
    fix="Write tolerance=0.01 for one per cent.",
  )
  check_value(
    headroom,
    _is_number(headroom) and 1 <= headroom < math.inf,
    "mpjax.tune(headroom)",
    expected="a number from 1 on, by which float16 values may grow",
    fix="Write headroom=16 for values that may become 16 times as large, or 1 for none.",
  )
  goal = Goal(tolerance, headroom)

  def report(loss_fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> TuneReport:
    return _tuned(TunedCall(policies, goal, loss_fn, args, kwargs, advance))

  return Pending("mpjax.tune(loss_fn)", loss_fn, report, _FIX)


def _is_number(x: object) -> bool:
  return isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)


def _parse_policies(policy: PolicyLike | Sequence[PolicyLike]) -> tuple[Policy, ...]:
  """Returns the policies to choose among, the preferred one first."""
  where = "mpjax.tune(policy)"
  # A string is a sequence too, and one policy.
  several = (policy,) if isinstance(policy, (str, Policy)) else policy
  is_sequence = isinstance(several, Sequence)  # Anything else is refused as a policy.
  parsed = tuple(parse_policy(each, where) for each in (several if is_sequence else (several,)))
  check_value(
    policy,
    bool(parsed) and all(each.compute_dtype in HALVES for each in parsed),
    where,
    expected="a policy that computes in bfloat16 or float16, or several of them",
    fix='Write "mixed_bfloat16" or "mixed_float16": tune finds the modules that need float32.',
  )
  check_value(
    policy,
    len(set(parsed)) == len(parsed),
    where,
    expected="policies that differ",
    fix='Name each once, the preferred first: ("mixed_float8", "mixed_bfloat16").',
  )
  return parsed


def _tuned(tuned: TunedCall) -> TuneReport:
  """Measures choices until the best is among them, all at one scale of the loss."""
  # The first measurement has no upgrade. If it is good, nothing is searched.
  policies, goal = tuned.policies, tuned.goal
  loss = prepare(tuned)
  sys.stdout.write(f"tune: {len(loss.flops)} modules, at most {loss.bound} measurements\n")
  tuner = Tuner(loss, reference_of(loss))
  low = tuner.measure({})
  if not goal.is_reached(tuner.evaluations[0]):
    tuner.search()
  # The search ends with a good choice, or the loss in float32 is one. Another measured choice may
  # be cheaper.
  good = [each for each in tuner.evaluations if goal.is_reached(each)]
  best = min(good, key=functools.partial(cost_of, policies, loss.flops))
  return TuneReport(
    policies=policies,
    tolerance=goal.tolerance,
    required_headroom=goal.headroom,
    **best._asdict(),
    evaluations=tuple(tuner.evaluations),
    bound=loss.bound,
    loss_scale=loss.scale,
    modules=tuple(tuner.rows(low)),
    models=loss.has_models,
    kernels=loss.kernels,
  )
