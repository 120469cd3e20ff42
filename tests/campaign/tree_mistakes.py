"""Mistakes with trees, wrappers, states and training steps; `mistakes.py` tells what counts."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

ONES = functools.partial(np.ones, dtype=np.float32)
PARAMS = {"a": ONES(2), "b": {"c": ONES((2, 3)), "d": ONES(())}}
TX = mpjax.loss_scaling(optax.adam(1e-3))
PLAIN = optax.adam(1e-3)
Entries = Iterator[tuple[Any, ...]]


def table(rng: np.random.Generator) -> Entries:
  del rng
  yield from wrong_trees()
  yield from wrong_wrappers()
  yield from wrong_losses()
  yield from wrong_states()
  yield from wrong_steps()


def damaged(tree: Any) -> Iterator[tuple[str, Any]]:
  """Yields trees that are not like `tree`: a leaf missing, left over, or of another shape."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  for i, (path, x) in enumerate(leaves):
    name = jax.tree_util.keystr(path)
    for shape in ((*x.shape, 1), (4,), (3, 2), (*x.shape[:-1], 5)):
      others = [y for _, y in leaves]
      others[i] = jnp.zeros(shape)
      yield f"{name} of shape {shape}", treedef.unflatten(others)
  yield "a leaf missing", {"a": tree["a"], "b": {"c": tree["b"]["c"]}}
  yield "a branch missing", {"a": tree["a"]}
  yield "a leaf too many", tree | {"e": jnp.ones(2)}
  yield "a list", [tree["a"], tree["b"]["c"], tree["b"]["d"]]
  yield "a leaf for a branch", {"a": tree["a"], "b": jnp.ones(2)}
  yield "one array", jnp.ones(2)


WRAPPERS: dict[str, tuple[Any, ...]] = {
  "loss_scaling": (),
  "accumulate_gradients": (2,),
  "master_weights": (),
}


def wrong_trees() -> Entries:
  for name, arguments in WRAPPERS.items():
    tx = getattr(mpjax, name)(PLAIN, *arguments)
    state = tx.init(PARAMS)
    where = f"mpjax.{name}(inner).update"
    integers = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.int32), PARAMS)
    for text, grads in (*damaged(PARAMS), ("integers", integers)):
      call = functools.partial(tx.update, grads, state, PARAMS)
      yield f"{name} {text}", call, ValueError, f"{where}(updates)"
    for other in (None, (), PARAMS, PLAIN.init(PARAMS), 3):
      call = functools.partial(tx.update, PARAMS, other, PARAMS)
      yield f"{name} state {jax.tree.structure(other)}", call, TypeError, f"{where}(state)"
    for dtype in ("int32", "uint8", "bool") if name != "loss_scaling" else ():
      call = functools.partial(tx.init, PARAMS | {"n": jnp.ones(2, dtype)})
      yield f"{name} {dtype} parameters", call, TypeError, "init(params)", dtype
  for text, updates in damaged(PARAMS):
    call = functools.partial(mpjax.apply_updates, PARAMS, updates)
    yield f"apply_updates {text}", call, ValueError, "mpjax.apply_updates(updates)"
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  masters = mpjax.master_weights(PLAIN).init(half)
  for text, params in damaged(PARAMS):
    call = functools.partial(mpjax.set_master_params, masters, params)
    yield f"set_master_params {text}", call, ValueError, "mpjax.set_master_params(params)"
    call = functools.partial(mpjax.select_tree, True, params, PARAMS)
    yield f"select_tree {text}", call, ValueError, "mpjax.select_tree(finite, new, old)"


def wrong_wrappers() -> Entries:
  inners = (None, 3, "adam", optax.adam, {}, PLAIN.update, optax.MultiSteps(PLAIN, 2), ())
  for inner in inners:
    text = f"inner {getattr(inner, '__name__', type(inner).__name__)}"
    for name, arguments in WRAPPERS.items():
      call = functools.partial(getattr(mpjax, name), inner, *arguments)
      yield f"{name} {text}", call, TypeError, f"mpjax.{name}(inner)", type(inner).__name__
  scales = (None, 3, 2.0**15, "dynamic", mpjax.DynamicLossScale, [mpjax.NoLossScale()], True)
  mixed = {"a": mpjax.NoLossScale(), "b": mpjax.StaticLossScale(2)}
  names = ("", "a:b", "a/b", 3, True, ("a",), b"a")
  words = ("clip", "clip_norm", "ema", "every", "scale", "init", "skip", "axis", "max_norm")
  # The argument, its values, the error, and whether the text shows the value.
  for field, values, error, shown in (
    ("loss_scale", scales, TypeError, False),
    ("loss_scale", ({}, mixed), ValueError, False),
    ("name", names, ValueError, True),
    ("check_updates", (None, 1, "yes", 0.0), TypeError, False),
    ("every", (0, -1, -7), ValueError, True),
    ("every", (1.5, True, None, "2", (2,), 2.0), TypeError, True),
  ):
    wrapper = "accumulate_gradients" if field == "every" else "loss_scaling"
    for value in values:
      call = functools.partial(getattr(mpjax, wrapper), PLAIN, **{field: value})
      got = repr(value) if shown else ""
      yield f"{field} {value!r}", call, error, f"mpjax.{wrapper}({field})", got
  for word in words:
    call = functools.partial(mpjax.loss_scaling, PLAIN, **{word: 1})
    yield f"keyword {word}", call, TypeError, f"mpjax.loss_scaling({word}=)", repr(word)
  for number, nested in enumerate(
    (
      mpjax.loss_scaling(TX),
      mpjax.loss_scaling(optax.chain(optax.clip(1.0), TX)),
      mpjax.loss_scaling(optax.masked(TX, True)),
      mpjax.loss_scaling(TX, mpjax.NoLossScale()),
      mpjax.accumulate_gradients(TX, 2),
      mpjax.accumulate_gradients(optax.chain(TX, optax.clip(1.0)), 2),
    )
  ):
    call = functools.partial(nested.init, PARAMS)
    yield f"nested {number}", call, TypeError, "(inner)", "loss_scaling"


def wrong_losses() -> Entries:
  state, plain = TX.init(PARAMS), PLAIN.init(PARAMS)
  no_floats: list[Any] = [jnp.asarray(1), jnp.asarray(True), 3, True, None, "loss", 1j, {}]
  for loss in no_floats:
    call = functools.partial(mpjax.scale_loss, loss, state)
    yield f"scale_loss {loss!r}", call, TypeError, "mpjax.scale_loss(loss)"
    call = functools.partial(mpjax.value_and_grad(lambda _, x=loss: x, state), PARAMS)
    yield f"value_and_grad {loss!r}", call, TypeError, "mpjax.value_and_grad(fun): the loss"
  for shape in ((1,), (2, 3), (0,)):
    loss = jnp.ones(shape)
    call = functools.partial(mpjax.scale_loss, loss, state)
    yield f"scale_loss {shape}", call, ValueError, "mpjax.scale_loss(loss)", str(shape)
    call = functools.partial(mpjax.value_and_grad(lambda _, x=loss: x, state), PARAMS)
    yield f"value_and_grad {shape}", call, ValueError, "mpjax.value_and_grad(fun): the loss"
  two = TX.init(PARAMS), TX.init(PARAMS)
  calls = {
    "scale_loss": functools.partial(mpjax.scale_loss, jnp.ones(())),
    "unscale": functools.partial(mpjax.unscale, PARAMS),
    "loss_scaling_metrics": mpjax.loss_scaling_metrics,
    "check_skipped_steps": mpjax.check_skipped_steps,
    "set_loss_scale": lambda s, **name: mpjax.set_loss_scale(s, 2.0, **name),
    "value_and_grad": functools.partial(mpjax.value_and_grad, jnp.sum),
  }
  for name, call in calls.items():
    where = f"mpjax.{name}(opt_state)"
    for text, other in (("plain", plain), ("none", None), ("tx", TX), ("params", PARAMS)):
      yield f"{name} of {text}", functools.partial(call, other), TypeError, where, "without"
    yield f"{name} of two", functools.partial(call, two), TypeError, where, "2"
    for word in ("generator", "a"):
      named = functools.partial(call, state, name=word)
      yield f"{name} named {word}", named, ValueError, f"{where} with name={word!r}"
  for error, values in (
    (ValueError, (0.0, -1.0, float("nan"), float("inf"), 2.0**25, 0.5, 2.0**127, 1e-40)),
    (TypeError, (None, "2", True, jnp.ones(()), [2.0])),
  ):
    for value in values:
      call = functools.partial(mpjax.set_loss_scale, state, value)
      yield f"set_loss_scale {value!r}", call, error, "mpjax.set_loss_scale(value)"


def wrong_states() -> Entries:
  for flag in (1, 1.0, None, jnp.ones(()), jnp.ones((), jnp.int32), "yes"):
    call = functools.partial(mpjax.select_tree, flag, PARAMS, PARAMS)
    yield f"commit {flag!r}", call, TypeError, "mpjax.select_tree(finite, new, old)"
  for shape in ((1,), (2,), (0,)):
    call = functools.partial(mpjax.select_tree, jnp.ones(shape, bool), PARAMS, PARAMS)
    yield f"commit {shape}", call, ValueError, "mpjax.select_tree(finite, new, old)", str(shape)
  for skips in (1, 3, 50):
    stuck = TX.init(PARAMS)
    (label,) = stuck.loss_scale
    scale = stuck.loss_scale[label]._replace(consecutive_skips=jnp.asarray(skips, jnp.int32))
    stuck = stuck._replace(loss_scale={label: scale})
    call = functools.partial(mpjax.check_skipped_steps, stuck, skips)
    where = "mpjax.check_skipped_steps(opt_state)"
    yield f"stuck for {skips}", call, RuntimeError, where, str(skips)
  key = jax.random.key(0)
  rounding = "mpjax.apply_updates(rounding"
  for word in ("Nearest", "stochastc", "up", "", None, 3):
    call = functools.partial(mpjax.apply_updates, PARAMS, PARAMS, rounding=word)
    yield f"rounding {word!r}", call, ValueError, rounding, repr(word)
  stochastic = {"rounding": "stochastic"}
  for text, arguments, got in (
    ("no key", stochastic, "None"),
    ("a key for nothing", {"key": key}, ""),
    ("master and stochastic", stochastic | {"key": key, "master": PARAMS}, ""),
  ):
    call = functools.partial(mpjax.apply_updates, PARAMS, PARAMS, **arguments)
    yield text, call, ValueError, rounding, got
  create = mpjax.TrainState.create
  where = "mpjax.TrainState.create"
  for number, tx in enumerate((PLAIN, optax.chain(optax.clip(1.0), TX), optax.chain(TX, TX))):
    call = functools.partial(create, PARAMS, tx)
    yield f"create with tx {number}", call, TypeError, f"{where}(tx)"
  for dtype in ("int32", "bool", "uint32"):
    params = PARAMS | {"n": jnp.ones(2, dtype)}
    yield f"create {dtype}", functools.partial(create, params, TX), TypeError, f"{where}(params)"
  for rng in (3, "key", jnp.ones(2), jax.random.split(key, 3), np.ones((2, 2), np.uint32)):
    call = functools.partial(create, PARAMS, TX, rng=rng)
    yield f"create rng {rng!r}", call, TypeError, f"{where}(rng)"
  for missing in (PLAIN.init(PARAMS), TX.init(PARAMS), None, PARAMS):
    call = functools.partial(mpjax.master_params, missing)
    text = f"masters of {jax.tree.structure(missing)}"
    yield text, call, TypeError, "mpjax.master_params(opt_state)", "without masters"
  for leaf in ("text", object(), None.__class__):
    call = functools.partial(mpjax.checkpoints.to_arrays, {"a": leaf})
    yield f"to_arrays {leaf!r}", call, TypeError, "mpjax.checkpoints.to_arrays(tree)", "at a"


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
  del rng
  return jnp.sum(params["a"]) * jnp.mean(batch), (model_state, {})


def wrong_steps() -> Entries:
  make = mpjax.make_train_step
  arguments: dict[tuple[str, type[Exception]], tuple[Any, ...]] = {
    ("accumulate", TypeError): (1.0, "2", None, True, (2,)),
    ("max_retries", TypeError): (1.0, "2", None, False),
    ("ema_decay", TypeError): (1, "0.9", True, (0.9,)),
    ("donate", TypeError): (None, 1, "no"),
    ("accumulate", ValueError): (0, -1),
    ("max_retries", ValueError): (-1, -5),
    ("ema_decay", ValueError): (1.0, -0.1, 1.5, float("nan")),
  }
  for (name, error), values in arguments.items():
    for value in values:
      call = functools.partial(make, loss_fn, TX, **{name: value})
      yield f"{name}={value!r}", call, error, f"mpjax.make_train_step({name})", repr(value)
  for value in (None, 3, "loss"):
    call = functools.partial(make, value, TX)
    yield f"loss_fn={value!r}", call, TypeError, "mpjax.make_train_step(loss_fn)", repr(value)
    call = functools.partial(make, loss_fn, value)
    yield f"tx={value!r}", call, TypeError, "mpjax.make_train_step(tx)", repr(value)

  state = mpjax.TrainState.create(PARAMS, TX, model_state={"mean": jnp.zeros(2)})
  for parts in (2, 3, 4, 8):
    for shape in ((parts + 1,), (2 * parts - 1, 3), ()):
      call = functools.partial(make(loss_fn, TX, accumulate=parts), state, jnp.ones(shape))
      where = f"mpjax.make_train_step(accumulate={parts}): step(batch)"
      yield f"{parts} parts of {shape}", call, ValueError, where, str(list(shape))
  for other in (PARAMS, None, TX.init(PARAMS), tuple(state)):
    call = functools.partial(make(loss_fn, TX), other, jnp.ones(2))
    yield f"step({jax.tree.structure(other)})", call, TypeError, "step(state)"
  call = functools.partial(make(loss_fn, TX, ema_decay=0.9), state, jnp.ones(2))
  yield "ema that is not kept", call, ValueError, "step(state): ema"
  average = mpjax.TrainState.create(PARAMS, TX, ema=True)
  call = functools.partial(make(loss_fn, TX), average, jnp.ones(2))
  yield "ema that is not updated", call, ValueError, "step(state): ema"
  for axis in ("data", "batch", ("data", "model")):
    call = functools.partial(make(loss_fn, TX, axis_name=axis), state, jnp.ones(2))
    yield f"axis {axis}", call, ValueError, "mpjax.make_train_step(axis_name=", "none of that name"
  returned: dict[str, Any] = {
    "a loss alone": lambda s, m: s,
    "a pair": lambda s, m: (s, m),
    "three": lambda s, m: (s, m, {}),
    "metrics in a list": lambda s, m: (s, (m, [])),
  }
  for text, give in returned.items():
    wrong = functools.partial(lambda p, m, b, r, give: give(jnp.sum(p["a"]), m), give=give)
    call = functools.partial(make(wrong, TX), state, jnp.ones(2))
    yield f"loss_fn returns {text}", call, TypeError, "mpjax.make_train_step(loss_fn)"
  for name in ("loss", "grad_norm", "finite", "skipped", "total", "loss_scale", "retries"):
    wrong = functools.partial(lambda p, m, b, r, name: (jnp.sum(p["a"]), (m, {name: 0})), name=name)
    call = functools.partial(make(wrong, TX), state, jnp.ones(2))
    yield f"metric {name}", call, ValueError, "mpjax.make_train_step(loss_fn): metrics", repr(name)
  for new in ({"mean": jnp.zeros(3)}, {"mean": jnp.zeros(2, jnp.float16)}, {}, (), {"var": 0.0}):
    wrong = functools.partial(lambda p, m, b, r, new: (jnp.sum(p["a"]), (new, {})), new=new)
    call = functools.partial(make(wrong, TX), state, jnp.ones(2))
    text = f"model state {jax.tree.map(jax.typeof, new)}"
    yield text, call, ValueError, "mpjax.make_train_step(loss_fn): model_state"
