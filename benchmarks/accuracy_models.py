"""Models whose gradients `accuracy.py` measures: those of the tests that are also written by hand.

Each can be computed in four ways, from the same float32 parameters: in float64, under a policy,
with dtypes that its author wrote, and, where Flax's own layers round more than they need to, with
layers written with care. To a model that knows of no dtype its author can only give parameters and
inputs that are cast: that counts as by hand where it brings every matmul into low precision.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import language_by_hand
import nnx_models
import numpy as np
from flax import nnx

import mpjax
from tests.models import by_hand, language, papers
from tests.models.values import filled, integers, normal, shapes
from tests.nnx import rig, zoo

SCALE = 2.0**8
"""What losses are multiplied by, so that float16 holds their gradients."""

Arguments = tuple[Any, Any, tuple[Any, ...]]


class Model(NamedTuple):
  """One model.

  Fields:
    draw: `seed -> (parameters, other variables, inputs)`, as NumPy's float32 arrays.
    loss: `(way, dtype) -> function of the three -> scalar`. The ways are "float64", "policy" and
      those in `by_hand`; the dtype is a low-precision one by name.
    by_hand: the ways in which its author would write it: "dtype", "care", "cast".
  """

  draw: Callable[[int], Arguments]
  loss: Callable[[str, str], Callable[..., Any]]
  by_hand: tuple[str, ...]


def to_scalar(tree: Any) -> Any:
  """Returns a loss of all floating outputs, added up in float32 or wider."""
  leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return sum(jnp.mean(jnp.square(wide(x) + 0.5)) for x in leaves) * SCALE


def wide(x: Any) -> Any:
  """Returns an array in float32, or in float64 if it is."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cast(tree: Any, dtype: Any) -> Any:
  """Returns a tree with its floating arrays cast."""
  return jax.tree.map(
    lambda x: x.astype(dtype) if hasattr(x, "dtype") and rig.is_float(x) else x, tree
  )


def redrawn(inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
  """Returns inputs for each seed: normal ones, the given integers shuffled, the same masks."""
  rng = np.random.default_rng(seed)

  def leaf(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
      return rng.normal(size=x.shape).astype(x.dtype)
    return x if x.dtype == bool else rng.permutation(x.ravel()).reshape(x.shape)

  return jax.tree.map(leaf, inputs)


def halved(params: Any) -> Any:
  """Returns parameters with which activations do not grow where nothing normalises them."""
  return jax.tree.map(lambda x: x * np.float32(0.5), params)


BOTH = ("dtype", "care")


# Linen


def float64_carries(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext):
  """An interceptor: `nn.RNN` begins with the carry that it would, in float64.

  Cells make it in their `param_dtype`, and a loop has one dtype from beginning to end.
  """
  module = context.module
  if isinstance(module, nn.RNN) and context.method_name == "__call__":
    x = args[0]
    with jax.ensure_compile_time_eval():  # A constant of the program, in float64 alone.
      carry = module.cell.initialize_carry(jax.random.key(0), (x.shape[0], *x.shape[2:]))
      kwargs = {**kwargs, "initial_carry": cast(carry, jnp.float64)}
  return next_fun(*args, **kwargs)


def without_dropout(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
  """An interceptor: dropout, whose mask is drawn anew in every dtype, keeps all."""
  return args[0] if isinstance(context.module, nn.Dropout) else next_fun(*args, **kwargs)


def linen(make: Callable[..., Any], *inputs: Any, ways: tuple[str, ...] = ("dtype",)) -> Model:
  """Returns a model that takes the dtype of its layers as `half`."""
  module = make()

  def draw(seed: int) -> Arguments:
    variables = filled(shapes(module, *inputs), seed)
    return variables.pop("params"), variables, redrawn(inputs, seed)

  # Of some models there is no other version.
  careful = {"careful": True} if ways == BOTH else {}

  def loss(way: str, dtype: str) -> Any:
    made = {
      "policy": lambda: mpjax.with_policy(module, f"mixed_{dtype}"),
      "float64": lambda: make(half=jnp.float64),
      "dtype": lambda: make(half=jnp.dtype(dtype)),
      "care": lambda: make(half=jnp.dtype(dtype), **careful),
    }[way]()

    def fun(params: Any, rest: Any, inputs: Any) -> Any:
      variables = {"params": params, **rest}
      reference = nn.intercept_methods(float64_carries)
      around = reference if way == "float64" else nullcontext()
      with around, nn.intercept_methods(without_dropout):
        out, _ = made.apply(variables, *inputs, mutable=list(rest))
      return to_scalar(out)

    return fun

  return Model(draw, loss, ways)


def casting_layers(dtype: Any) -> Any:
  """Returns an interceptor: each layer of Flax computes in `dtype`, as with its own field.

  Its parameters are cast already, and so are its inputs now.
  """

  def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if hasattr(context.module, "dtype"):
      args, kwargs = cast((args, kwargs), dtype)
    return next_fun(*args, **kwargs)

  return interceptor


def _outputs(model: Any, variables: Any, *inputs: Any) -> Any:
  return to_scalar(model.apply(variables, *inputs, mutable=["batch_stats"])[0])


def without_dtype(
  make: Callable[[], Any], inputs: tuple[Any, ...], scalar: Callable[..., Any] = _outputs
) -> Model:
  """Returns a Linen model that knows of no dtype; `scalar` is `(model, variables, *inputs)`."""

  def draw(seed: int) -> Arguments:
    model = make()
    variables = filled(shapes(getattr(model, "module", model), *inputs), seed)
    params = halved(variables.pop("params"))
    return params, variables.get("batch_stats", {}), redrawn(inputs, seed)

  def loss(way: str, dtype: str) -> Any:
    def fun(params: Any, stats: Any, inputs: Any) -> Any:
      around: Any = nullcontext()
      if way == "cast":
        params, inputs = cast((params, inputs), dtype)
        around = nn.intercept_methods(casting_layers(dtype))
      if way == "policy":
        around = mpjax.policy_scope(f"mixed_{dtype}")
      with around, nn.intercept_methods(without_dropout):
        return scalar(
          make(), {"params": params, **({"batch_stats": stats} if stats else {})}, *inputs
        )

    return fun

  return Model(draw, loss, ("cast",))


def paper(name: str) -> Model:
  """Returns a model with the loss of its paper."""
  found = papers.PAPERS[name]

  def scalar(model: Any, variables: Any, *inputs: Any) -> Any:
    return wide(found.loss(model, variables["params"], *inputs)) * SCALE

  return without_dtype(found.make, found.inputs, scalar)


# NNX


def nnx_model(
  make: Callable[..., nnx.Module],
  inputs: tuple[Any, ...],
  run: Callable[..., Any] = lambda model, *inputs: model(*inputs),
  ways: tuple[str, ...] = ("cast",),
) -> Model:
  """Returns an NNX model, which takes the dtype of its layers as `half` unless `ways` is "cast"."""

  def draw(seed: int) -> Arguments:
    _, params, rest = rig.split(make, seed)
    return halved(params) if "cast" in ways else params, rest, redrawn(inputs, seed)

  def loss(way: str, dtype: str) -> Any:
    written = make
    if way in ("dtype", "care"):
      written = functools.partial(make, half=jnp.dtype(dtype), careful=way == "care")
    graphdef, _, _ = rig.split(written)

    def fun(params: Any, rest: Any, inputs: Any) -> Any:
      if way == "cast":
        params, inputs = cast((params, inputs), dtype)
      model: Any = nnx.merge(graphdef, params, rest, copy=True)
      # A mask of dropout is drawn anew in every dtype.
      model.set_attributes(deterministic=True, raise_if_not_found=False)
      if way == "float64":
        set_dtypes(model, "param_dtype", "dtype", to=jnp.float64)
      if way == "cast":
        set_dtypes(model, "dtype", to=jnp.dtype(dtype))
      if way == "policy":
        model = mpjax.with_policy(model, f"mixed_{dtype}")
      return to_scalar(run(model, *inputs))

    return fun

  return Model(draw, loss, ways)


def set_dtypes(model: Any, *names: str, to: Any) -> None:
  """Sets what the layers of an NNX model compute in, and what their carries begin with."""
  for _, node in nnx.iter_graph(model):
    for name in set(names) & set(vars(node) if isinstance(node, nnx.Module) else ()):
      setattr(node, name, to)
    if to == jnp.float64 and isinstance(node, nnx.MultiHeadAttention):
      node.attention_fn = attention


def attention(query: Any, key: Any, value: Any, mask: Any = None, is_causal=False, **_: Any) -> Any:
  """Attention in the dtype that it is given, which `jax.nn`'s computes in float32."""
  logits = jnp.einsum("bthd,bshd->bhts", query / np.sqrt(query.shape[-1]), key)
  seen = jnp.tril(jnp.ones(logits.shape[-2:], bool)) if is_causal else True
  logits = jnp.where(seen if mask is None else seen & mask, logits, jnp.finfo(logits.dtype).min)
  return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value)


_IDS = integers(4, 8, below=11)
_TOKENS = integers(3, 8, below=17)
_IS_TOKEN = np.arange(8)[None] < np.array([[8], [5], [6]])

BY_HAND = {
  # By the name here: that of the test's model, an input, and how its author would write it.
  "MLP": ("mlp", normal(8, 12), ("dtype",)),
  "CNN": ("hard_coded", normal(2, 6, 6, 3), ("dtype",)),
  "ResNet": ("resnet", normal(4, 8, 8, 3), ("dtype",)),
  "MLP-Mixer": ("mixer", normal(3, 8, 12), ("dtype",)),
  "transformer block": ("transformer", normal(2, 8, 16), BOTH),
  "LSTM": ("lstm", normal(3, 6, 9), BOTH),
  "GRU": ("gru", normal(3, 6, 9), BOTH),
  "gated language model": ("language_model", _IDS, BOTH),
}

MODELS: Mapping[str, Model] = {
  **{
    f"Linen {name}": linen(functools.partial(by_hand.linen, key), x, ways=ways)
    for name, (key, x, ways) in BY_HAND.items()
  },
  "Linen GPT": linen(language_by_hand.Gpt, _TOKENS, ways=("care",)),
  "Linen BERT": linen(language_by_hand.Bert, _TOKENS, ways=("care",)),
  "Linen LSTM language model": linen(language_by_hand.Lstm, _TOKENS, ways=("care",)),
  "Linen ResNet, SiLU": without_dtype(
    functools.partial(by_hand.linen, "resnet", activation=jax.nn.silu), (normal(4, 8, 8, 3),)
  ),
  "Linen BERT, masked": without_dtype(language.Bert, (_TOKENS, _TOKENS % 2, _IS_TOKEN)),
  # Of the loop that decodes, and keeps a cache in float32, there is no version in float64.
  **{f"Linen {name}": paper(name) for name in papers.PAPERS if name != "gpt_decode_loop"},
  **{
    f"NNX {name}": nnx_model(functools.partial(by_hand.of_nnx, key), (x,), ways=ways)
    for name, (key, x, ways) in BY_HAND.items()
  },
  **{f"NNX {name}": nnx_model(*each) for name, each in {**zoo.MODELS, **nnx_models.MODELS}.items()},
}
