"""How far models are from float32 under a policy, in Linen, in NNX and by autocast.

Everything that is compared comes out of one compiled program for each model.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests import programs
from tests.models.catalogue import FUNCTIONS, LAYERS, LINEN, Model
from tests.models.delicate import CASES
from tests.models.papers import PAPERS
from tests.models.plain import cross_entropy
from tests.nnx.rig import is_float
from tests.programs import cast

# As people run them: ranks are promoted in every other line.
pytestmark = [
  pytest.mark.standard_promotion,
  # Some delicate models solve systems of activations, which warns.
  pytest.mark.filterwarnings("ignore:mpjax. .* takes the result of low-precision:UserWarning"),
]

BOUNDS = {"bfloat16": 1.6e-2, "float16": 2.1e-3}
SCALES = {"bfloat16": 1.0, "float16": 2.0**10}
SEEDS = 5
KINDS = [
  "cells",
  *(pytest.param(kind, marks=pytest.mark.accuracy) for kind in ("attention", "loops", "others")),
]
TWICE = {name for name in LAYERS if LAYERS[name].attention} | {"nnx/gru_cell"}
"""Layers whose gradients may be off by twice as much as the others': attention; and a cell of which
one unit of one seed is saturated, so that 1 - tanh^2 cancels (2.6e-3 in float16). It does so with a
dtype set by hand too."""


def drawn(tree: Any, seed: int, largest: float) -> Any:
  """Returns normal values in place of the floating arrays of a tree, none above `largest`."""
  # They are multiples of 1/16, which both half types hold: what is measured is the layer, and a
  # maximum is where it is in float32.
  rng = np.random.default_rng(seed)

  def leaf(x: Any) -> Any:
    values = np.clip(rng.normal(size=x.shape), -largest, largest)
    return (values * 16).round().astype(np.float32) / 16 if is_float(x) else x

  return jax.tree.map(leaf, tree)


def outputs_and_gradients(call: Any, scale: float = 1.0, of: str = "params") -> Any:
  """Returns `(params, rest, inputs) -> (outputs, gradients)`, whose loss is scaled inside.

  Args:
    call: a function of the three, as in the catalogue.
    scale: what the loss is multiplied by.
    of: "params": of the loss, which is the first output, by the parameters; "all": of a weighted
      sum of all outputs, by the inputs too if they are floating; "nothing": there are none.
  """

  def both(params: Any, rest: Any, inputs: Any) -> Any:
    moving = of == "all" and all(is_float(x) for x in jax.tree.leaves(inputs))

    def loss(params: Any, floats: Any) -> Any:
      out, _ = call(params, rest, floats if moving else inputs)
      if of == "params":
        return scale * jax.tree.leaves(out)[0].astype(jnp.float32), out
      weighted = jax.tree.map(lambda x, w: jnp.sum(x * w), out, drawn(out, 3, 4.0))
      return scale * sum(jax.tree.leaves(weighted)), out

    if of == "nothing":
      return call(params, rest, inputs)[0], ()
    grads, out = jax.grad(loss, (0, 1), has_aux=True)(params, inputs if moving else ())
    return out, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)

  return both


def arguments(name: str, seed: int) -> Any:
  """Returns parameters, other variables and inputs of a layer."""
  largest = 1.0 if name.endswith("_cell") else 4.0  # A carry is a mean of tanh.
  params, rest, inputs = LAYERS[name].arguments(seed)
  floating = all(is_float(x) for x in jax.tree.leaves(inputs))
  return params, rest, drawn(inputs, 10 + seed, largest) if floating else inputs


def kind(name: str) -> str:
  """Layers of one kind have kernels of XLA in common, which are compiled once in one program."""
  loops = name.endswith(("_rnn", "/bidirectional"))
  others = "loops" if loops else "cells" if name.endswith("_cell") else "others"
  return "attention" if LAYERS[name].attention else others


@pytest.mark.slow
@pytest.mark.parametrize("which", KINDS)
def test_layers_are_as_near_to_float32_as_their_type_allows(which):
  names = [name for name in LAYERS if kind(name) == which]
  calls = {
    name: {"float32": LAYERS[name].call("plain", None)}
    | {half: LAYERS[name].call("with_policy", f"mixed_{half}") for half in BOUNDS}
    for name in names
  }

  @programs.jitted
  def every(args: Any) -> Any:
    return {
      name: {
        dtype: outputs_and_gradients(call, of="all")(*args[name]) for dtype, call in each.items()
      }
      for name, each in calls.items()
    }

  wrong = []
  for seed in range(SEEDS):
    all_found = jax.device_get(every({name: arguments(name, seed) for name in names}))
    for name, half in itertools.product(names, BOUNDS):
      found, (out, grads) = all_found[name][half], all_found[name]["float32"]
      forward, backward = programs.error(found[0], out), 0.0
      if jax.tree.leaves(grads):
        backward = programs.error(found[1], grads)
      bound = BOUNDS[half]
      if forward > bound or backward > bound * (2 if name in TWICE else 1):
        wrong.append(f"{name}, {half}, seed {seed}: {forward:.2g} forward, {backward:.2g} backward")
  assert wrong == []


# Complete models.

WITHOUT_LOSS = ("resnet", "bert")
WHOLE = {**{name: LINEN[name] for name in (*PAPERS, *WITHOUT_LOSS)}, **FUNCTIONS}
"""Those of the catalogue that compute a loss, or logits."""

MAKE_FLOAT32 = ("gpt_decode_loop", "unet", "field_by_its_hessian")
"""Papers whose model makes an array in float32: in half arguments it is not all in half."""

LOW_STREAM = ("decoder",)
"""Functions whose residual stream begins with parameters alone. It is in low precision, as by hand,
which bounds its error."""


def initial(name: str) -> Any:
  """Returns the parameters that a model of a paper starts with."""
  made = PAPERS[name].make()
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  init = getattr(made, "module", made).init
  return programs.run(lambda args: init(keys, *args)["params"], PAPERS[name].inputs)


def with_loss(call: Any) -> Any:
  """Returns a model whose first output is a loss of the others, each of them logits."""

  def fun(*args: Any) -> Any:
    out, state = call(*args)
    logits = jax.tree.leaves(out)
    labels = (np.zeros(x.shape[:-1], np.int32) for x in logits)
    return (sum(map(cross_entropy, logits, labels)), out), state

  return fun


def all_cast_outside(model: Model, half: str) -> Any:
  """Returns a function whose parameters and inputs are cast once, outside of the model.

  That is all that can be done to a model without a dtype of its own, short of rewriting it.
  """
  call = model.call("plain", None)
  return lambda params, rest, inputs: call(cast(params, half), rest, cast(inputs, half))


@pytest.mark.accuracy
@pytest.mark.parametrize("name", WHOLE)
def test_outputs_and_gradients_are_as_near_to_float32_as_their_type_allows(name):
  model = WHOLE[name]
  params, rest, inputs = model.arguments()
  if name in PAPERS:
    params = initial(name)
  way = "autocast" if name in FUNCTIONS else "policy_scope"
  of = "params" if model.backward else "nothing"

  def fun_of(call: Any, scale: float = 1.0) -> Any:
    return outputs_and_gradients(with_loss(call) if name in WITHOUT_LOSS else call, scale, of)

  funs = {"float32": fun_of(model.call("plain", None))}
  for half, scale in SCALES.items():
    funs[half] = fun_of(model.call(way, f"mixed_{half}"), scale)
    if name in LOW_STREAM or (name in PAPERS and name not in MAKE_FLOAT32):
      outside = all_cast_outside(model, half)
      assert programs.half_share(jax.make_jaxpr(outside)(params, rest, inputs)) == 1
      funs[f"{half} by hand"] = fun_of(outside, scale)

  def every(*args: Any) -> Any:
    return {who: fun(*args) for who, fun in funs.items()}

  found = jax.device_get(programs.run(every, params, rest, inputs))
  (out, grads), wrong = found["float32"], []
  for half, bound in BOUNDS.items():
    forward, backward = programs.error(found[half][0], out), 0.0
    if model.backward:
      backward = programs.error(found[half][1], grads)
    bounds = [bound * (2 if model.attention else 1)]
    if name in LOW_STREAM:
      bound = programs.error(found[f"{half} by hand"][0], out)
    elif f"{half} by hand" in found:
      bounds.append(1.5 * programs.error(found[f"{half} by hand"][1], grads))
    if forward > bound or backward > min(bounds):
      wrong.append(f"{half}: {forward:.2g} forward, {backward:.2g} backward, bounds {bounds}")
  assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS if name.endswith("_cell")])
def test_cells_return_one_dtype_and_are_near_an_all_half_cell_for_mixes_of_dtypes(name):
  model, args = LAYERS[name], arguments(name, 0)
  mixes = list(itertools.product((False, True), repeat=3))

  def call(half, mix, params, rest, inputs):
    params, *inputs = (
      cast(x, half) if low else x for x, low in zip((params, *inputs), mix, strict=True)
    )
    policied = model.call("with_policy", mpjax.Policy(compute_dtype=half))
    return policied(params, rest, tuple(inputs))[0]

  def near(*args):
    several = (False, True, False), (True, False, True)
    found = {half: [call(half, mix, *args) for mix in several] for half in BOUNDS}
    return found, {half: all_cast_outside(model, half)(*args)[0] for half in BOUNDS}

  for half, mix in itertools.product(BOUNDS, mixes):
    shapes = jax.eval_shape(functools.partial(call, half, mix), *args)
    # A gate is computed in float32 for the sum that the state is, whatever the state comes in.
    wanted = half if "simple" in name else "float32"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {wanted}
  found, control = programs.run(near, *args)
  for half, bound in BOUNDS.items():
    for each in found[half]:
      errors = [programs.error(*pair) for pair in zip(each, control[half], strict=True)]
      assert max(errors) <= bound


# Where a value is rounded decides the result: policies against dtypes by hand.

SOLVING = ("kernel_before_cholesky", "whitened_features")
"""Cases whose linear algebra multiplies the rounding of a matmul."""
WARNS = "linear algebra multiplies their rounding"


class Linen(nn.Module):
  """A function with parameters as a module, its body in a submodule."""

  name_of: str

  @nn.compact
  def __call__(self, x):
    fun, params, _ = CASES[self.name_of]
    return fun({key: self.param(key, lambda _, v=v: v) for key, v in params.items()}, x, None)


class Nnx(nnx.Module):
  def __init__(self, name: str):
    fun, params, _ = CASES[name]
    self.fun, self.params = fun, nnx.data({key: nnx.Param(v) for key, v in params.items()})

  def __call__(self, x):
    return self.fun({key: v[...] for key, v in self.params.items()}, x, None)


def policied(name: str, half: str) -> Any:
  model = mpjax.linen.with_policy(Linen(name), f"mixed_{half}")
  return lambda params, x: model.apply({"params": params}, x)


def with_gradient(fun: Any) -> Any:
  """Returns a function that returns its result, and the gradient of the mean of its square."""

  def both(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
      out = fun(params, x)
      return jnp.mean(out.astype(jnp.float32) ** 2), out

    grads, out = jax.grad(loss, has_aux=True)(params)
    return out, grads

  return both


def near(x: Any, seed: int) -> Any:
  """Returns an input like `x`: itself for seed 0."""
  if seed == 0 or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
    return x
  return x * np.float32(1 + 0.05 * np.random.default_rng(seed).standard_normal(np.shape(x)))


COMPARED = [name for name in CASES if name not in SOLVING]
GROUPS = [COMPARED[i::4] for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
  "names",
  [pytest.param(g, marks=pytest.mark.accuracy) for g in GROUPS[:-1]] + GROUPS[-1:],
  ids=lambda names: names[0],
)
def test_errors_are_at_most_those_of_dtypes_by_hand(names):
  @programs.jitted
  def every(params: Any, inputs: Any) -> Any:
    found = {}
    for name in names:
      forms = {"plain": functools.partial(CASES[name].fun, low=None)}
      for half in BOUNDS:
        forms[half] = policied(name, half)
        forms[f"{half} by hand"] = functools.partial(CASES[name].fun, low=jnp.dtype(half))
      args = params[name], inputs[name]
      found[name] = {form: with_gradient(fun)(*args) for form, fun in forms.items()}
    return found

  wrong = []
  params = {name: dict(CASES[name].params) for name in names}
  # In one draw alone it is chance which of two roundings is the larger one.
  draws = [every(params, {name: near(CASES[name].x, seed) for name in names}) for seed in range(4)]
  stacked = jax.tree.map(lambda *x: np.stack(x).astype(np.float64), *draws)
  for (name, found), half in itertools.product(stacked.items(), BOUNDS):
    forms = found[half], found[f"{half} by hand"], found["plain"]
    for what, got, hand, want in zip(("result", "gradient"), *forms, strict=True):
      ours, by_hand = programs.relative_error(got, want), programs.relative_error(hand, want)
      if np.isfinite(by_hand) and not np.isfinite(ours):
        wrong.append(f"{name}, {half}, {what}: not finite, as it is by hand")
      # Gradients in float16 that are not scaled overflow and underflow, and that of a norm is zero:
      # they say nothing.
      if what == "gradient" and (half == "float16" or by_hand > 0.5):
        continue
      if not ours <= 1.2 * by_hand + 1e-6:
        wrong.append(f"{name}, {half}, {what}: {ours:.2g}, by hand {by_hand:.2g}")
  assert wrong == []


@pytest.mark.parametrize("name", SOLVING)
def test_linear_algebra_after_a_matmul_warns(name):
  with pytest.warns(UserWarning, match=WARNS):
    jax.eval_shape(policied(name, "bfloat16"), dict(CASES[name].params), CASES[name].x)


@pytest.mark.filterwarnings(f"ignore:.*{WARNS}")
@pytest.mark.parametrize("name", [*CASES][::3])
def test_autocast_a_scope_and_nnx_compute_the_same(name):
  fun, params, x = CASES[name]
  ways = {
    "linen": policied(name, "bfloat16"),
    "autocast": mpjax.autocast(lambda p, x: fun(p, x, None), data_argnums=1),
  }
  found = {
    way: programs.operations(jax.make_jaxpr(call)(dict(params), x)) for way, call in ways.items()
  }
  with mpjax.linen.policy_scope("mixed_bfloat16"):
    call = lambda p, x: Linen(name).apply({"params": p}, x)  # noqa: E731
    found["scope"] = programs.operations(jax.make_jaxpr(call)(dict(params), x))
  view = mpjax.nnx.with_policy(Nnx(name), "mixed_bfloat16")
  graph, state = nnx.split(view)
  called = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x)
  found["nnx"] = programs.operations(called)
  differ = [way for way, each in found.items() if sorted(each) != sorted(found["linen"])]
  assert differ == []
