"""Mistakes of users, by the hundred: each must be refused at once, in words that help.

What counts is the class of the error, and that its text has all four parts: the call and argument,
what was expected, what came, and what to do. Nothing is compiled.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
import mpjax.linen
from tests.campaign.outcome import Job, Outcome, require

FOUR_PARTS = re.compile(r"(?P<where>.+?): expected (.+?), got (?P<got>.+)\. (?P<fix>\S.+)", re.S)


Rows = Iterator[tuple[Any, ...]]
"""Of tables: a function, the values that it must refuse, the class of the error, a fragment of its
first part (the call and argument), one of what came or a function of the value, and what else tells
the row apart. A mapping gives texts for values that have no short one."""


def named(call, name, *args, **kwargs):
  """Returns a function of the argument `name` of `call`."""
  return lambda value: call(*args, **kwargs, **{name: value})


def jobs(small: bool, guard: bool) -> list[Job]:
  tables = {
    "configurations": configurations,
    "policies and dtypes": policies,
    "rules": rules,
    "trees and steps": trees_and_steps,
  }
  return [
    Job("mistakes", functools.partial(make, name, table, small, guard=guard))
    for name, table in tables.items()
  ]


def make(name: str, table, small: bool, rng, *, guard: bool) -> list[Outcome]:
  """Makes the mistakes of one table; without the guard nothing is refused."""
  outcome, mistakes = Outcome(f"mistakes: {name}"), {}
  for row in table(rng):
    call, values, error, where, got, about = (*row, *("", "")[len(row) - 4 :])
    pairs = values if isinstance(values, Mapping) else {repr(value): value for value in values}
    for text, value in pairs.items():
      mistake = f"{where} {about} {text}"
      require(mistake not in mistakes, f"{name}: {mistake} is made twice")
      fragment = got(value) if callable(got) else got
      mistakes[mistake] = functools.partial(call, value), error, where, fragment
  for text, (call, *wanted) in list(mistakes.items())[:: 7 if small else 1]:
    problem = wrong_answer(call if guard else lambda: None, *wanted)
    outcome.injected += 1
    outcome.lose(bool(problem), f"{text}: {problem}")
  return [outcome]


def wrong_answer(call: Callable[[], Any], wanted: type[Exception], where: str, got: str) -> str:
  """Makes a mistake; returns what is wrong with the answer, or nothing."""
  try:
    call()
  except wanted as error:
    parts = FOUR_PARTS.fullmatch(str(error))
    if not isinstance(error, mpjax.MpjaxError):
      return f"not one of ours: {error!r}"
    if parts is None:
      return f"not four parts: {error}"
    if where not in parts["where"] or got not in parts["got"]:
      return f"{where!r} or {got!r} is not in its place: {error}"
    return ""
  except Exception as error:
    return f"not a {wanted.__name__}: {error!r}"
  return "no error"


TYPES = (True, "2", None, [2.0], (2,), 2j, {}, b"2", object(), np.ones(1), np.ones(2))
"""No plain numbers."""

NAN, INF = float("nan"), float("inf")
NOT_FINITE = (NAN, INF, -INF, 2.0**128, -1e39)
OUTSIDE = (0.0, -0.0, -1.0, -(2.0**15), 2.0**127, 1e38, 2.0**-127, 1e-44, 2.0**-149)


def type_name(value: Any) -> str:
  return type(value).__name__


def configurations(rng) -> Rows:
  dynamic, static = mpjax.DynamicLossScale, mpjax.StaticLossScale
  factors, counts = ("growth_factor", "backoff_factor"), ("growth_interval", "hysteresis")
  wrong: dict[str, list[Any]] = {}
  for field in ("init_scale", "min_scale", "max_scale"):
    wrong[field] = [*NOT_FINITE, *OUTSIDE, *-rng.random(9) * 1e6]
  for field in factors:
    wrong[field] = [*NOT_FINITE, 0.0, -2.0, 1.0, *-rng.random(9)]
  wrong["growth_factor"] += [*rng.random(9)]
  wrong["backoff_factor"] += [2.0, 2**-127, *1 + rng.random(9)]
  for field in counts:
    wrong[field] = [0, -1, 2**31, 2**40, *map(int, -rng.integers(2, 10**6, 9))]
  for field, values in wrong.items():
    make_one, where = named(dynamic, field), f"mpjax.DynamicLossScale({field})"
    types = (*TYPES, 1.0, 2.5, NAN) if field in counts else TYPES
    yield make_one, values, ValueError, where
    yield make_one, types, TypeError, where
  where = "mpjax.StaticLossScale(scale)"
  yield static, (*NOT_FINITE, 0.0, *OUTSIDE[2:]), ValueError, where
  yield static, TYPES, TypeError, where, type_name
  for number, (low, high, init) in enumerate(2.0 ** rng.integers(-9, 24, (60, 3))):
    limits = {"min_scale": float(low), "max_scale": float(high), "init_scale": float(init)}
    if low > high or not low <= init <= high:
      where = f"DynamicLossScale({'min_scale' if low > high else 'init_scale'})"
      yield lambda x: dynamic(**x), [limits], ValueError, where, "", number


PRESETS = ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16")
DTYPES = ("float32", "bfloat16", "float16", "f32", "bf16", "f16", "fp16", "half")


def misspelt(words: tuple[str, ...], rng, count: int) -> list[str]:
  """Returns `count` different words that are one letter away from these, and none of them."""
  found: dict[str, None] = {}
  while len(found) < count:
    word = str(rng.choice(words))
    at = int(rng.integers(0, len(word)))
    letter = str(rng.choice(list("xyzqk")))
    for typo in (word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]):
      if typo not in words:
        found[typo] = None
  return list(found)[:count]


def policies(rng) -> Rows:
  parse, where = mpjax.Policy.parse, "mpjax.Policy.parse(policy)"
  yield parse, misspelt(PRESETS, rng, 60), ValueError, where, repr
  no_texts = (None, 3, 2.0, [], jnp.float32, ("float32",), {"p": "f32"}, object())
  yield parse, no_texts, TypeError, where, repr
  keys, typos = ("params", "compute", "output"), misspelt(DTYPES, rng, 40)
  for key in keys:
    field = "mpjax.Policy(" + key.removesuffix("s") + "_dtype=...)"
    texts = {f"{key}={typo}": f"{key}={typo}" for typo in typos}
    yield parse, texts, ValueError, field, lambda text: text.partition("=")[2]
  texts = [f"compute=bf16,{typo}=f32" for typo in misspelt(keys, rng, 30)]
  second = "{!r} as item 2".format
  yield parse, texts, ValueError, where, lambda text: second(text.partition(",")[2])
  items = (
    *("p=f32,", ",p=f32", "p=f32,,c=bf16", "p=", "=f32", "p=f32,c", "p,c=bf16", "c=bf16, ,o=f32"),
    *("p=f32,p=f16", "params=f32,p=f32", "c=bf16,o=f32,compute=f16", "w=f32,weight_grad=f32"),
  )
  yield parse, items, ValueError, where, repr
  fields = ("param_dtype", "compute_dtype", "output_dtype", "weight_grad_dtype")
  types = ["int32", "bool", "uint8", "complex64", jnp.int8, np.bool_, np.dtype("complex128"), float]
  types += [object(), 3, [jnp.float32]]
  for field in fields:
    make_one, where = named(mpjax.Policy, field), f"mpjax.Policy({field}=...)"
    yield make_one, [*types, *[None] * (field in fields[:2])], TypeError, where
    yield make_one, ("float", "double", "float64", "f64", "fp64"), ValueError, where
    yield make_one, misspelt(DTYPES, rng, 12), ValueError, where, repr
    if field != "param_dtype":
      eighths = ("float8_e4m3fn", "float8_e5m2", jnp.float8_e4m3b11fnuz)
      yield make_one, eighths, TypeError, where, "float8"
  for compute in ("float32", "bfloat16", "float16"):
    make_one = named(mpjax.Policy, "weight_grad_dtype", compute_dtype=compute)
    others = [dtype for dtype in ("bfloat16", "float16") if dtype != compute]
    yield make_one, others, ValueError, "Policy(weight_grad_dtype=...)", str, compute


class Model(nn.Module):
  """A few modules to aim rules at."""

  @nn.compact
  def __call__(self, x):
    for i in range(2):
      x = nn.Dense(2, name=f"layer_{i}")(x)
    return nn.Dense(1, name="head")(x)


def rules(rng) -> Rows:
  rule = mpjax.Rule
  selectors = {"path": "head", "module": nn.Dense, "where": callable}
  names = list(selectors)
  for chosen in ([], names[:2], names[1:], names[::2], names):
    given = {str(chosen): {name: selectors[name] for name in chosen}}
    yield lambda x: rule("float32", **x), given, ValueError, "mpjax.Rule(...)"
  globs = ["head", "layer_*", "encoder/*/attention", "**/norm", "layer_?", "a/b/c"]
  broken = ["/{}", "{}/", "{}//x", "{}[", "]{}", "({})", "{}$", "^{}", "{}.x", "{}|x", "{}+"]
  broken += [r"x\{}"]
  paths = [pattern.format(glob) for glob in globs for pattern in broken]
  yield named(rule, "path", "float32"), paths, ValueError, "mpjax.Rule(path=...)", repr
  for name, values in {
    "path": (3, b"head", ["head"], nn.Dense),
    "module": (3, "Dense", (), (nn.Dense, "x"), nn.Dense(2), [nn.Dense]),
    "where": (3, "head", (nn.Dense,)),
  }.items():
    yield named(rule, name, None), values, TypeError, f"Rule({name}=...)"
  where, typos = "mpjax.Policy.parse(policy)", misspelt(PRESETS, rng, 20)
  yield lambda typo: rule(typo, path="head"), typos, ValueError, where, repr

  with_policy, about = mpjax.linen.with_policy, "with_policy"
  values = (3, "head", [rule(None, path="x"), "y"], [3], rule(None, path="x"))
  make_one = named(with_policy, "rules", Model(), "float32")
  yield make_one, values, TypeError, f"{about}(rules=...)"
  make_one = functools.partial(with_policy, policy="float32")
  yield make_one, (Model, 3, nn.relu, None, {}), TypeError, f"{about}(model)"
  make_one = named(with_policy, "unmatched", Model(), "float32")
  yield make_one, ("rise", "Raise", None, True), ValueError, f"{about}(unmatched=...)"
  x, key = jax.ShapeDtypeStruct((1, 2), jnp.float32), jax.random.key(0)
  unmatched = [{"path": typo} for typo in misspelt(("head", "layer_0", "layer_1"), rng, 24)]
  unmatched += [{"module": nn.Conv}, {"module": (nn.Conv, nn.BatchNorm)}]
  unmatched += [{"path": re.compile(r"layer_[2-9]")}, {"where": lambda module: False}]

  def init(selector):
    model = with_policy(Model(), "mixed_bfloat16", [rule("float32", **selector)])
    return jax.eval_shape(model.init, key, x)

  yield init, unmatched, mpjax.errors.UnmatchedRuleError, "rules: Rule(", "none of the"


ONES = functools.partial(np.ones, dtype=np.float32)
PARAMS = {"a": ONES(2), "b": {"c": ONES((2, 3)), "d": ONES(())}}
TX = mpjax.loss_scaling(optax.adam(1e-3))
PLAIN = optax.adam(1e-3)


def no_states() -> dict[str, Any]:
  return {"none": None, "params": PARAMS, "plain": PLAIN.init(PARAMS)}


def trees_and_steps(rng) -> Rows:
  del rng
  for table in (wrong_trees, wrong_wrappers, wrong_losses, wrong_states, wrong_steps):
    yield from table()


def damaged(tree: Any) -> dict[str, Any]:
  """Returns trees that are not like `tree`: a leaf missing, left over, or of another shape."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  found: dict[str, Any] = {}
  for i, (path, x) in enumerate(leaves):
    for shape in ((*x.shape, 1), (4,), (3, 2), (*x.shape[:-1], 5)):
      others = [y for _, y in leaves]
      others[i] = jnp.zeros(shape)
      found[f"{jax.tree_util.keystr(path)} of shape {shape}"] = treedef.unflatten(others)
  return found | {
    "a leaf missing": {"a": tree["a"], "b": {"c": tree["b"]["c"]}},
    "a branch missing": {"a": tree["a"]},
    "a leaf too many": tree | {"e": jnp.ones(2)},
    "a list": [tree["a"], tree["b"]["c"], tree["b"]["d"]],
    "a leaf for a branch": {"a": tree["a"], "b": jnp.ones(2)},
    "one array": jnp.ones(2),
  }


def wrong_trees() -> Rows:
  wrappers = {
    "loss_scaling(inner)": TX,
    "accumulate_gradients(inner)": mpjax.accumulate_gradients(PLAIN, 2),
    "master_weights(inner)": mpjax.master_weights(PLAIN),
  }
  trees = damaged(PARAMS)
  integers = {"integers": jax.tree.map(lambda p: jnp.ones(p.shape, jnp.int32), PARAMS)}
  for name, tx in wrappers.items():
    where, update = f"mpjax.{name}.update", functools.partial(tx.update, params=PARAMS)
    call = functools.partial(update, state=tx.init(PARAMS))
    yield call, trees | integers, ValueError, f"{where}(updates)"
    call, states = functools.partial(update, PARAMS), no_states() | {"nothing": (), "3": 3}
    yield call, states, TypeError, f"{where}(state)"
  update = functools.partial(mpjax.apply_updates, PARAMS)
  yield update, trees, ValueError, "mpjax.apply_updates(updates)"
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  put = functools.partial(mpjax.set_master_params, mpjax.master_weights(PLAIN).init(half))
  yield put, trees, ValueError, "mpjax.set_master_params(params)"
  select = functools.partial(mpjax.select_tree, True, old=PARAMS)
  yield select, trees, ValueError, "mpjax.select_tree(finite, new, old)"
  params = with_integers("int32", "uint8", "bool")
  for name in ("accumulate_gradients(inner)", "master_weights(inner)"):
    yield wrappers[name].init, params, TypeError, "init(params)", lambda p: p["n"].dtype.name, name


def with_integers(*dtypes: str) -> dict[str, Any]:
  return {dtype: PARAMS | {"n": jnp.ones(2, dtype)} for dtype in dtypes}


def wrong_wrappers() -> Rows:
  scaling, accumulate = mpjax.loss_scaling, mpjax.accumulate_gradients
  inners = (None, 3, "adam", optax.adam, {}, PLAIN.update, optax.MultiSteps(PLAIN, 2), ())
  wrap: dict[str, Callable[[Any], Any]] = {
    "loss_scaling": scaling,
    "accumulate_gradients": lambda inner: accumulate(inner, 2),
    "master_weights": mpjax.master_weights,
  }
  for name, call in wrap.items():
    yield call, inners, TypeError, f"mpjax.{name}(inner)", type_name
  none, two = mpjax.NoLossScale(), mpjax.StaticLossScale(2)
  scales = (None, 3, 2.0**15, "dynamic", mpjax.DynamicLossScale, [none], True)
  call, where = named(scaling, "loss_scale", PLAIN), "mpjax.loss_scaling(loss_scale)"
  yield call, scales, TypeError, where
  yield call, ({}, {"a": none, "b": two}), ValueError, where
  names, where = ("", "a:b", "a/b", 3, True, ("a",), b"a"), "mpjax.loss_scaling(name)"
  yield named(scaling, "name", PLAIN), names, ValueError, where, repr
  call, where = named(scaling, "check_updates", PLAIN), "mpjax.loss_scaling(check_updates)"
  yield call, (None, 1, "yes", 0.0), TypeError, where
  for word in ("clip", "clip_norm", "ema", "every", "scale", "init", "skip", "axis", "max_norm"):
    where = f"mpjax.loss_scaling({word}=)"
    yield named(scaling, word, PLAIN), [1], TypeError, where, repr(word)
  call, where = functools.partial(accumulate, PLAIN), "mpjax.accumulate_gradients(every)"
  yield call, (0, -1, -7), ValueError, where, repr
  yield call, (1.5, True, None, "2", (2,), 2.0), TypeError, where, repr
  clip = optax.clip(1.0)
  nested = (
    *(scaling(TX), scaling(optax.chain(clip, TX)), scaling(optax.masked(TX, True))),
    *(scaling(TX, none), accumulate(TX, 2), accumulate(optax.chain(TX, clip), 2)),
  )
  texts = {f"nested {number}": tx for number, tx in enumerate(nested)}
  yield lambda tx: tx.init(PARAMS), texts, TypeError, "(inner)", "loss_scaling"


def wrong_losses() -> Rows:
  state = TX.init(PARAMS)

  def grad(loss):
    return mpjax.value_and_grad(lambda _: loss, state)(PARAMS)

  scale, where = functools.partial(mpjax.scale_loss, opt_state=state), "mpjax.scale_loss(loss)"
  no_floats: list[Any] = [jnp.asarray(1), jnp.asarray(True), 3, True, None, "loss", 1j, {}]
  yield scale, no_floats, TypeError, where
  yield grad, no_floats, TypeError, "mpjax.value_and_grad(fun): the loss"
  shapes = {str(shape): jnp.ones(shape) for shape in ((1,), (2, 3), (0,))}
  yield scale, shapes, ValueError, where, lambda x: str(x.shape)
  yield grad, shapes, ValueError, "mpjax.value_and_grad(fun): the loss"
  calls: dict[str, Callable[..., Any]] = {
    "scale_loss": functools.partial(mpjax.scale_loss, jnp.ones(())),
    "unscale": functools.partial(mpjax.unscale, PARAMS),
    "loss_scaling_metrics": mpjax.loss_scaling_metrics,
    "check_skipped_steps": mpjax.check_skipped_steps,
    "set_loss_scale": lambda s, **name: mpjax.set_loss_scale(s, 2.0, **name),
    "value_and_grad": functools.partial(mpjax.value_and_grad, jnp.sum),
  }
  for name, call in calls.items():
    where = f"mpjax.{name}(opt_state)"
    yield call, no_states() | {"tx": TX}, TypeError, where, "without"
    yield call, {"two": (state, state)}, TypeError, where, "2"
    for word in ("generator", "a"):
      one = functools.partial(call, name=word)
      yield one, {"": state}, ValueError, f"{where} with name={word!r}"
  values = (0.0, -1.0, NAN, INF, 2.0**25, 0.5, 2.0**127, 1e-40)
  call, where = functools.partial(mpjax.set_loss_scale, state), "mpjax.set_loss_scale(value)"
  yield call, values, ValueError, where
  yield call, (None, "2", True, jnp.ones(2), [2.0]), TypeError, where


def wrong_states() -> Rows:
  select, where = mpjax.select_tree, "mpjax.select_tree(finite, new, old)"
  commit = functools.partial(select, new=PARAMS, old=PARAMS)
  flags = (1, 1.0, None, jnp.ones(()), jnp.ones((), jnp.int32), "yes")
  yield commit, flags, TypeError, where
  shapes = {str(shape): jnp.ones(shape, bool) for shape in ((1,), (2,), (0,))}
  yield commit, shapes, ValueError, where, lambda x: str(x.shape)

  def check_stuck(skips):
    state = TX.init(PARAMS)
    ((label, scale),) = state.loss_scale.items()
    scale = scale._replace(consecutive_skips=jnp.asarray(skips, jnp.int32))
    mpjax.check_skipped_steps(state._replace(loss_scale={label: scale}), skips)

  where = "mpjax.check_skipped_steps(opt_state)"
  yield check_stuck, (1, 3, 50), RuntimeError, where, str
  key, where = jax.random.key(0), "mpjax.apply_updates(rounding"

  def update(options):
    return mpjax.apply_updates(PARAMS, PARAMS, **options)

  words = [{"rounding": word} for word in ("Nearest", "stochastc", "up", "", None, 3)]
  yield update, words, ValueError, where, lambda options: repr(options["rounding"])
  stochastic = {"rounding": "stochastic"}
  yield update, [stochastic], ValueError, where, "None"
  unfit = {"a key for nothing": {"key": key}, "master": stochastic | {"key": key, "master": PARAMS}}
  yield update, unfit, ValueError, where
  create, where = mpjax.TrainState.create, "mpjax.TrainState.create"
  wrong = {"0": PLAIN, "1": optax.chain(optax.clip(1.0), TX), "2": optax.chain(TX, TX)}
  yield functools.partial(create, PARAMS), wrong, TypeError, f"{where}(tx)"
  params = with_integers("int32", "bool", "uint32")
  yield functools.partial(create, tx=TX), params, TypeError, f"{where}(params)"
  no_keys = (3, "key", jnp.ones(2), jax.random.split(key, 3), np.ones((2, 2), np.uint32))
  yield named(create, "rng", PARAMS, TX), no_keys, TypeError, f"{where}(rng)"
  states, where = no_states() | {"scaled": TX.init(PARAMS)}, "mpjax.master_params(opt_state)"
  yield mpjax.master_params, states, TypeError, where, "without masters"
  where, leaves = "mpjax.checkpoints.to_arrays(tree)", ("text", object(), type(None))
  yield lambda leaf: mpjax.checkpoints.to_arrays({"a": leaf}), leaves, TypeError, where, "at a"


def wrong_steps() -> Rows:
  make_step = mpjax.make_train_step

  def loss_fn(params, model_state, batch, rng):
    return jnp.sum(params["a"]) * jnp.mean(batch), (model_state, {})

  types: dict[str, tuple[Any, ...]] = {
    "accumulate": (1.0, "2", None, True, (2,)),
    "max_retries": (1.0, "2", None, False),
    "ema_decay": (1, "0.9", True, (0.9,)),
    "donate": (None, 1, "no"),
  }
  values = {"accumulate": (0, -1), "max_retries": (-1, -5), "ema_decay": (1.0, -0.1, 1.5, NAN)}
  for error, table in ((TypeError, types), (ValueError, values)):
    for name, wrong in table.items():
      where = f"mpjax.make_train_step({name})"
      yield named(make_step, name, loss_fn, TX), wrong, error, where, repr
  for name, call in {
    "loss_fn": functools.partial(make_step, tx=TX),
    "tx": functools.partial(make_step, loss_fn),
  }.items():
    where = f"mpjax.make_train_step({name})"
    yield call, (None, 3, "loss"), TypeError, where, repr

  state = mpjax.TrainState.create(PARAMS, TX, model_state={"mean": jnp.zeros(2)})

  def step(state, **options):
    return make_step(loss_fn, TX, **options)(state, jnp.ones(2))

  for parts in (2, 3, 4, 8):
    shapes = {str(x): jnp.ones(x) for x in ((parts + 1,), (2 * parts - 1, 3), ())}
    call = functools.partial(make_step(loss_fn, TX, accumulate=parts), state)
    where = f"mpjax.make_train_step(accumulate={parts}): step(batch)"
    yield call, shapes, ValueError, where, lambda x: str(list(x.shape))
  others = {"params": PARAMS, "none": None, "scaling": TX.init(PARAMS), "a tuple": tuple(state)}
  yield step, others, TypeError, "step(state)"
  keeping = functools.partial(step, ema_decay=0.9)
  yield keeping, {"not kept": state}, ValueError, "step(state): ema"
  average = {"not updated": mpjax.TrainState.create(PARAMS, TX, ema=True)}
  yield step, average, ValueError, "step(state): ema"
  call, where = named(step, "axis_name", state), "mpjax.make_train_step(axis_name="
  yield call, ("data", "batch", ("data", "model")), ValueError, where, "none of that name"

  def returning(give):
    wrong_loss = lambda p, old, batch, rng: give(jnp.sum(p["a"]), old)  # noqa: E731
    return make_step(wrong_loss, TX)(state, jnp.ones(2))

  where = "mpjax.make_train_step(loss_fn)"
  returned: dict[str, Callable[[Any, Any], Any]] = {
    "a loss alone": lambda s, m: s,
    "a pair": lambda s, m: (s, m),
    "three": lambda s, m: (s, m, {}),
    "metrics in a list": lambda s, m: (s, (m, [])),
  }
  yield returning, returned, TypeError, where
  names = ("loss", "grad_norm", "finite", "skipped", "total", "loss_scale", "retries")
  call, at = lambda name: returning(lambda s, m: (s, (m, {name: 0}))), f"{where}: metrics"
  yield call, names, ValueError, at, repr
  news = ({"mean": jnp.zeros(3)}, {"mean": jnp.zeros(2, jnp.float16)}, {}, (), {"var": 0.0})
  call, at = lambda new: returning(lambda s, m: (s, (new, {}))), f"{where}: model_state"
  yield call, news, ValueError, at
