"""Every model that tests put under a policy, whatever framework it is written in: one entry each.

To add a model is to add an entry: `linen(...)`, `nnx_(...)` or `function(...)`. Then
tests/integration/test_catalogue.py reads its jaxprs, in every way in which it can be run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import mpjax
from tests.autocast.programs import PROGRAMS
from tests.models import by_hand, language, layers, situations
from tests.models.papers import PAPERS
from tests.models.values import filled, integers, normal, shapes
from tests.nnx import rig, zoo

RNGS = {"dropout": jax.random.key(2)}

Call = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any]]


class Model(NamedTuple):
  """One model, and what is special about it.

  Fields:
    ways: in which a policy can be given: "with_policy", "policy_scope", "autocast".
    arguments: `(seed=0) -> (parameters, other variables, inputs)`, with values made by NumPy.
    call: `(way, policy, rules=()) -> function of these three -> (outputs, new variables)`; there is
      no policy in the way "plain".
    products: whether it has matmuls or convolutions.
    attention: whether there is attention in it.
    norm: whether it is a norm, which rounds its result and nothing else.
    ends_in_float32: whether the last operation is one of the float32 list, or a float32 carry.
    backward: whether it has a gradient (a while loop has none, a training step takes its own).
    power_iteration: whether a power iteration stays in float32, beside matmuls of three rows.
    in_vmap: whether it calls the model for one example, in a `vmap` outside of the policy. What all
      examples share is a sum in low precision there: see docs/limits.md.
  """

  ways: tuple[str, ...]
  arguments: Callable[..., tuple[Any, Any, tuple[Any, ...]]]
  call: Callable[..., Call]
  products: bool = True
  attention: bool = False
  norm: bool = False
  ends_in_float32: bool = False
  backward: bool = True
  power_iteration: bool = False
  in_vmap: bool = False


def linen(make: Any, inputs: tuple[Any, ...], run: Any, kwargs: Any = None, **flags: Any) -> Model:
  """Returns an entry for Linen; `run` is `(model, variables, *inputs) -> (outputs, variables)`."""

  @functools.cache
  def traced() -> Any:
    model = make()
    return shapes(getattr(model, "module", model), *inputs, **(kwargs or {}))

  def arguments(seed: int = 0) -> Any:
    variables = dict(filled(traced(), seed))
    return variables.pop("params", {}), variables, inputs

  def call(way: str, policy: Any, rules: Any = ()) -> Call:
    model = make()
    if way == "with_policy" and hasattr(model, "module"):
      model.module = mpjax.linen.with_policy(model.module, policy, rules)
    elif way == "with_policy":
      model = mpjax.linen.with_policy(model, policy, rules)

    def fun(params: Any, rest: Any, inputs: Any) -> Any:
      return run(model, {"params": params, **rest}, *inputs)

    def in_scope(*args: Any) -> Any:
      with mpjax.linen.policy_scope(policy, rules):
        return fun(*args)

    if way == "autocast":
      return mpjax.autocast(fun, policy, data_argnums=(1, 2))
    return in_scope if way == "policy_scope" else fun

  return Model(("with_policy", "policy_scope", "autocast"), arguments, call, **flags)


def applied(**kwargs: Any) -> Callable[..., Any]:
  """Returns what runs a Linen model by `apply`, all its other variables mutable."""

  def run(model: Any, variables: Any, *inputs: Any) -> Any:
    state = [name for name in variables if name != "params"]
    return model.apply(variables, *inputs, **kwargs, rngs=RNGS, mutable=state)

  return run


def called(model: Any, *inputs: Any) -> Any:
  return model(*inputs)


def nnx_(make: Any, inputs: tuple[Any, ...], run: Any = called, **flags: Any) -> Model:
  """Returns an entry for NNX; `run` is `(model, *inputs) -> outputs`."""
  split = functools.cache(lambda: rig.split(make))

  def arguments(seed: int = 0) -> Any:
    _, params, rest = split()
    keys, others = nnx.split_state(rest, nnx.RngState, ...)
    values = nnx.merge_state(keys, rig.by_name(others, seed))
    return rig.by_name(params, seed), values, inputs

  def call(way: str, policy: Any, rules: Any = ()) -> Call:
    policy_of_view = policy if way == "with_policy" else None
    forward, _ = rig.functions(split()[0], policy_of_view, run, rules=rules)
    return mpjax.autocast(forward, policy, data_argnums=(1, 2)) if way == "autocast" else forward

  return Model(("with_policy", "autocast"), arguments, call, **flags)


def function(make: Callable[[], Any], **flags: Any) -> Model:
  """Returns an entry for a function `(params, batch) -> (loss, outputs)`."""
  made = functools.cache(make)

  def call(way: str, policy: Any, rules: Any = ()) -> Call:
    fun = made().fun
    cast = mpjax.autocast(fun, policy, rules=rules) if way == "autocast" else fun
    return lambda params, _, batch: (cast(params, batch), ())

  return Model(("autocast",), lambda: (made().params, (), made().batch), call, **flags)


def layer(name: str, **flags: Any) -> dict[str, Any]:
  """Returns what the name of one of Flax's layers says of it."""
  norm = name in ("layer_norm", "rms_norm", "group_norm", "instance_norm") or "batch_norm" in name
  gated = name.startswith(("lstm", "optimized_lstm", "gru", "mgu", "conv_lstm"))
  carries = gated or name in ("simple_rnn", "bidirectional")
  return {
    "attention": name.startswith("attention"),
    "norm": norm,
    "ends_in_float32": carries or name in ("dropout", "prelu", "pooling"),
    "power_iteration": name == "spectral_norm",
    **flags,
  }


def _layers() -> dict[str, Model]:
  found = {}
  for name, made in layers.LAYERS.items():
    flags = layer(name, products=made.products)
    run = functools.partial(lambda kwargs, view, *args: view(*args, **kwargs), made.kwargs)
    if made.linen:
      apply = applied(**made.kwargs)
      found[f"linen/{name}"] = linen(made.linen, made.inputs, apply, made.kwargs, **flags)
    if made.nnx:
      found[f"nnx/{name}"] = nnx_(made.nnx, made.inputs, run, **flags)
  return found


def stateless(run: Any) -> Callable[..., Any]:
  """Returns what runs a Linen model and returns no variables beside the outputs of `run`."""
  return lambda model, variables, *inputs: (run(model, variables, *inputs), ())


def paper(found: Any, **flags: Any) -> Model:
  run = stateless(lambda model, variables, *inputs: found.loss(model, variables["params"], *inputs))
  return linen(found.make, found.inputs, run, attention=found.attention, **flags)


def _whole(make: Any, *inputs: Any, **flags: Any) -> Model:
  return linen(make, inputs, applied(), **flags)


_IDS = integers(3, 8, below=11)
_PADDED = np.arange(8) < np.asarray([[8], [5], [6]])

LAYERS: dict[str, Model] = _layers()
"""Those that Flax ships, by "linen/name" and "nnx/name"."""

LINEN: dict[str, Model] = {
  **{
    name: linen(make, (situations.X,), applied(), backward=name != "while_loop")
    for name, make in situations.SITUATIONS.items()
  },
  **{name: paper(found, in_vmap=name == "field_by_its_hessian") for name, found in PAPERS.items()},
  # A smooth activation: beside a kink, rounding may choose another slope altogether, and the error
  # of a gradient would say more of the inputs than of the arithmetic.
  "resnet": _whole(
    functools.partial(by_hand.linen, "resnet", activation=jax.nn.silu), normal(4, 8, 8, 3)
  ),
  "bert": _whole(language.Bert, integers(3, 8, below=17), _IDS % 2, _PADDED, attention=True),
}

NNX: dict[str, Model] = {
  **{
    name: nnx_(*found, in_vmap=name == "field_by_its_gradient")
    for name, found in zoo.MODELS.items()
  },
}

FUNCTIONS: dict[str, Model] = {
  name: function(found.make, attention=found.attention, backward=found.backward)
  for name, found in PROGRAMS.items()
}

MODELS: dict[str, Model] = {
  **LAYERS,
  **{f"linen/{name}": model for name, model in LINEN.items()},
  **{f"nnx/{name}": model for name, model in NNX.items()},
  **{f"function/{name}": model for name, model in FUNCTIONS.items()},
}
