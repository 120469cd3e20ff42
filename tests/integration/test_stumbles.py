"""What users stumbled over while modules cast their arguments: by default it is right.

Each test runs in both low-precision dtypes, in Linen and in NNX, and one compiled program makes all
that it compares. No rules, lists or adapters are given unless the test is about rules. The jaxprs
of these models are read by tests/integration/test_catalogue.py, which also shows that a scope of
Linen makes the program that a wrapper makes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import Rule
from tests import programs
from tests.models import catalogue, stumbles
from tests.models import stumbles_models as models
from tests.models.stumbles import ALMOST_ONE, EPS
from tests.models.stumbles_models import RAYS, TIMES, Part
from tests.models.values import normal
from tests.nnx.rig import is_float


@pytest.fixture(params=["linen", "nnx"])
def framework(request):
  return request.param


@pytest.fixture(params=["bfloat16", "float16"])
def half(request):
  return request.param


class Form(NamedTuple):
  """One way to compute a model: its description, the half type of a policy or None, the inputs."""

  part: Part
  half: str | None
  args: tuple[Any, ...]


def entry(framework: str, part: Part, args: tuple[Any, ...]) -> catalogue.Model:
  if framework == "linen":
    return catalogue.linen(lambda: part.linen(None), args, catalogue.applied())
  return catalogue.nnx_(lambda rngs: part.nnx(None, rngs), args)


def call_of(framework: str, form: Form, rules: Any = ()) -> Any:
  """Returns the model as a function of parameters and inputs."""
  made = entry(framework, form.part, form.args)
  way, rules = ("with_policy", rules) if form.half else ("plain", ())
  call = made.call(way, f"mixed_{form.half}", rules)
  rest = made.arguments()[1] if framework == "nnx" else {}
  return lambda params, args: call(params, rest, args)[0]


def params_of(framework: str, form: Form, **values: Any) -> Any:
  """Returns parameters made by NumPy, but for the leaves whose names are given."""

  def leaf(path: Any, x: Any) -> Any:
    names = [name for name in values if f"'{name}'" in jax.tree_util.keystr(path)]
    return np.broadcast_to(values[names[0]], x.shape).astype(x.dtype) if names else x

  params = entry(framework, form.part, form.args).arguments()[0]
  return jax.tree_util.tree_map_with_path(leaf, params)


def with_gradients(call: Any) -> Any:
  """Returns a function of parameters and inputs: output, and gradients of its sum by all floats."""

  def both(params: Any, args: Any) -> Any:
    def loss(params: Any, floats: Any) -> Any:
      given = iter(floats)
      out = call(params, tuple(next(given) if is_float(x) else x for x in args))
      return sum(jnp.sum(x) for x in jax.tree.leaves(out)), out

    floats = [x for x in args if is_float(x)]
    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, floats)
    return out, grads

  return both


def ran(framework: str, *forms: Form, rules: Any = (), **values: Any) -> list[Any]:
  """Returns what each form of a model makes of the same parameters, all of one program."""
  funs = [call_of(framework, form, rules) for form in forms]

  def every(params: Any, args: Any) -> Any:
    return [fun(params, each) for fun, each in zip(funs, args, strict=True)]

  params = params_of(framework, forms[0], **values)
  return jax.device_get(programs.run(every, params, [form.args for form in forms]))


# Positions, times, coordinates.


def test_positions_given_to_a_helper_or_a_module(framework, half):
  args = (normal(2048, 16),)
  want, inline, *moved = ran(
    framework,
    Form(models.rotary("inline"), None, args),
    *(Form(models.rotary(place), half, args) for place in ("inline", "helper", "module")),
  )
  inline = programs.relative_error(inline, want)
  assert 0 < inline < 2 * EPS[half]
  assert all(programs.relative_error(x, want) <= 1.2 * inline for x in moved)


@pytest.mark.parametrize(
  ("model", "args"),
  [
    (models.denoiser, (normal(1024, 8), TIMES)),
    (models.denoiser, (normal(1024, 8), TIMES.astype(np.int32))),
    (models.nerf, RAYS),
  ],
  ids=["float_timesteps", "integer_timesteps", "coordinates"],
)
def test_what_submodules_make_of(model, args, framework, half):
  made = (Form(model(), None, args), Form(model(half), None, args), Form(model(), half, args))
  want, by_hand, got = ran(framework, *made)
  by_hand = programs.relative_error(by_hand, want)
  assert 0 < by_hand < 4 * EPS[half]
  assert programs.relative_error(got, want) <= 1.2 * by_hand


# Probabilities.

ENDS = ("by hand", "by hand in a helper", "by hand in a module", "of JAX", "log_softmax")


def test_probabilities_sum_to_one_by_softmax(framework):
  cases = [(half, end) for half in (None, *EPS) for end in ENDS]
  forms = [Form(models.ends(end), half, (normal(64, 8),)) for half, end in cases]
  found = dict(zip(cases, np.asarray(ran(framework, *forms), np.float64), strict=True))
  for half, end in cases[len(ENDS) :]:
    got = found[half, end]
    assert np.mean(got == got.astype(jnp.dtype(half))) < 0.1, f"{end}: computed or rounded so"
    assert programs.relative_error(got, found[None, end]) < 4 * EPS[half], end
    probabilities = np.exp(got) if end == "log_softmax" else got
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=0, atol=1e-6, err_msg=end)


# Where products must stay in float32, or must not.

X = np.ones((2, 16), np.float32)
IN_HALF, IN_FULL = np.float32(16), 16 * ALMOST_ONE  # What X makes of weights that are almost one.


def test_a_layer_called_in_half_and_in_full_precision(framework, half):
  # Its weights are 1 in half only; a module that a rule keeps in float32 reads them as well.
  orders = ("half full read", "full read half", "read half full")
  made = [Form(models.precisely(order), half, (X,)) for order in orders]
  for found in ran(framework, *made, rules=[Rule("float32", path="reader")], w=ALMOST_ONE):
    for got, want in zip(found, (IN_HALF, IN_FULL, IN_FULL), strict=True):
      np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kernel", ["half_attention", "cudnn_attention"])
def test_kernels_that_take_nothing_but_half(kernel, framework, half, monkeypatch):
  # For CUDA as far as one comes without it: traced and lowered, as the model by hand is.
  stumbles.pretend_cudnn(monkeypatch)
  args = (normal(2, 64, 16),)
  plain = Form(models.fused_block("any_attention"), None, args)
  ours, by_hand = (
    Form(models.fused_block(kernel), half, args),
    Form(models.fused_block(kernel, half), None, args),
  )
  params = params_of(framework, plain)
  with pytest.raises(NotImplementedError, match="must be fp16/bf16"):
    jax.make_jaxpr(call_of(framework, Form(ours.part, None, args)))(params, args)
  traced = [
    jax.jit(with_gradients(call_of(framework, form))).trace(params, args)
    for form in (ours, by_hand)
  ]
  assert all(product.is_low_precision for product in programs.products(traced[0].jaxpr))
  lowered = [each.lower(lowering_platforms=("cuda",)).as_text() for each in traced]
  calls = 2 if kernel == "cudnn_attention" else 0
  assert [text.count("@__cudnn$fmha") for text in lowered] == [calls, calls]
  if kernel == "half_attention":
    want, got = ran(framework, plain, ours)
    assert programs.relative_error(got, want) < 4 * EPS[half]
