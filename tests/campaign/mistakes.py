"""Mistakes of users, by the hundred: each must be refused at once, in words that help.

What counts is the class of the error, and that its text has all four parts: the call and argument,
what was expected, what came, and what to do. Here are configurations, dtypes, policies and rules;
`tree_mistakes.py` has trees, wrappers and training steps. Nothing is compiled.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mpjax
import mpjax.linen
from tests.campaign import tree_mistakes
from tests.campaign.outcome import Job, Outcome, require

FOUR_PARTS = re.compile(r"(?P<where>.+?): expected (.+?), got (?P<got>.+)\. (?P<fix>\S.+)", re.S)


class Mistake(NamedTuple):
  """One call that must raise."""

  text: str  # what tells it apart
  call: Callable[[], Any]
  error: type[Exception]
  where: str  # a fragment of the first part
  got: str = ""  # a fragment of what came


def jobs(small: bool, guard: bool) -> list[Job]:
  tables = {
    "configurations": configurations,
    "policies and dtypes": policies,
    "rules": rules,
    "trees and steps": tree_mistakes.table,
  }
  return [
    Job("mistakes", functools.partial(make, name, table, small, guard=guard))
    for name, table in tables.items()
  ]


def make(
  name: str,
  table: Callable[[np.random.Generator], Iterator[Any]],
  small: bool,
  rng: np.random.Generator,
  *,
  guard: bool,
) -> list[Outcome]:
  """Makes the mistakes of one table; without the guard nothing is refused."""
  outcome = Outcome(f"mistakes: {name}")
  begin = time.perf_counter()
  mistakes = [Mistake(*fields) for fields in table(rng)]
  require(len({m.text for m in mistakes}) == len(mistakes), f"{name}: a mistake made twice")
  for mistake in mistakes[:: 7 if small else 1]:
    problem = wrong_answer(mistake if guard else mistake._replace(call=lambda: None))
    outcome.injected += 1
    if problem:
      outcome.lose(1, f"{mistake.text}: {problem}")
  outcome.seconds = time.perf_counter() - begin
  return [outcome]


def wrong_answer(mistake: Mistake) -> str:
  """Makes a mistake; returns what is wrong with the answer, or nothing."""
  try:
    mistake.call()
  except mistake.error as error:
    parts = FOUR_PARTS.fullmatch(str(error))
    if not isinstance(error, mpjax.MpjaxError):
      return f"not one of ours: {error!r}"
    if parts is None:
      return f"not four parts: {error}"
    if mistake.where not in parts["where"] or mistake.got not in parts["got"]:
      return f"{mistake.where!r} or {mistake.got!r} is not in its place: {error}"
    return ""
  except Exception as error:
    return f"not a {mistake.error.__name__}: {error!r}"
  return "no error"


TYPES = (True, "2", None, [2.0], (2,), 2j, {}, b"2", object(), np.ones(1), np.ones(()))
"""No plain numbers."""

NOT_FINITE = (float("nan"), float("inf"), -float("inf"), 2.0**128, -1e39)
OUTSIDE = (0.0, -0.0, -1.0, -(2.0**15), 2.0**127, 1e38, 2.0**-127, 1e-44, 2.0**-149)


def configurations(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
  dynamic, static = mpjax.DynamicLossScale, mpjax.StaticLossScale
  bad: list[tuple[str, Any, type[Exception]]] = []
  positive = ("init_scale", "min_scale", "max_scale")
  for field in positive:
    bad += [(field, x, ValueError) for x in (*NOT_FINITE, *OUTSIDE, *-rng.random(9) * 1e6)]
  for field in ("growth_factor", "backoff_factor"):
    bad += [(field, x, ValueError) for x in (*NOT_FINITE, 0.0, -2.0, 1.0, *-rng.random(9))]
  bad += [("growth_factor", x, ValueError) for x in rng.random(9)]
  bad += [("backoff_factor", x, ValueError) for x in (2.0, 2**-127, *1 + rng.random(9))]
  for field in ("growth_interval", "hysteresis"):
    bad += [(field, x, ValueError) for x in (0, -1, 2**31, 2**40)]
    bad += [(field, int(x), ValueError) for x in -rng.integers(2, 10**6, 9)]
    bad += [(field, x, TypeError) for x in (*TYPES, 1.0, 2.5, float("nan"))]
  for field in (*positive, "growth_factor", "backoff_factor"):
    bad += [(field, x, TypeError) for x in TYPES]
  for number, (field, value, error) in enumerate(bad):
    call = functools.partial(dynamic, **{field: value})
    yield f"{number}: {field}={value!r}", call, error, f"mpjax.DynamicLossScale({field})"
  for value in (*NOT_FINITE, *OUTSIDE[:1], *OUTSIDE[2:]):
    where = "mpjax.StaticLossScale(scale)"
    yield f"static {value}", functools.partial(static, value), ValueError, where
  for value in TYPES:
    call, got = functools.partial(static, value), type(value).__name__
    yield f"static {value!r}", call, TypeError, "mpjax.StaticLossScale(scale)", got
  for low, high, init in 2.0 ** rng.integers(-9, 24, (60, 3)):
    limits = {"min_scale": float(low), "max_scale": float(high), "init_scale": float(init)}
    if low > high or not low <= init <= high:
      field = "min_scale" if low > high else "init_scale"
      text = f"{limits} {rng.random()}"
      yield text, functools.partial(dynamic, **limits), ValueError, f"DynamicLossScale({field})"


PRESETS = ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16")
DTYPES = ("float32", "bfloat16", "float16", "f32", "bf16", "f16", "fp16", "half")


def misspelt(words: tuple[str, ...], rng: np.random.Generator, count: int) -> list[str]:
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


def policies(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
  parse = mpjax.Policy.parse
  where = "mpjax.Policy.parse(policy)"
  for typo in misspelt(PRESETS, rng, 60):
    yield f"preset {typo}", functools.partial(parse, typo), ValueError, where, repr(typo)
  for value in (None, 3, 2.0, [], jnp.float32, ("float32",), {"p": "f32"}, object()):
    yield f"policy {value!r}", functools.partial(parse, value), TypeError, where, repr(value)
  keys = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
  for typo in misspelt(DTYPES, rng, 40):
    for key, field in keys.items():
      text = f"{key}={typo}"
      yield text, functools.partial(parse, text), ValueError, f"mpjax.Policy({field}=...)", typo
  for typo in misspelt(tuple(keys), rng, 30):
    text = f"compute=bf16,{typo}=f32"
    yield text, functools.partial(parse, text), ValueError, where, f"'{typo}=f32' as item 2"
  for items in (
    *("p=f32,", ",p=f32", "p=f32,,c=bf16", "p=", "=f32", "p=f32,c", "p,c=bf16", "c=bf16, ,o=f32"),
    *("p=f32,p=f16", "params=f32,p=f32", "c=bf16,o=f32,compute=f16", "w=f32,weight_grad=f32"),
  ):
    yield f"items {items}", functools.partial(parse, items), ValueError, where, repr(items)
  fields = ("param_dtype", "compute_dtype", "output_dtype", "weight_grad_dtype")
  for field in fields:
    here = f"mpjax.Policy({field}=...)"
    wrong = ["int32", "bool", "uint8", "complex64", jnp.int8, np.bool_, np.dtype("complex128")]
    wrong += [float, object(), 3, [jnp.float32]]
    wrong += [None] if field in fields[:2] else []
    for value in wrong:
      make = functools.partial(mpjax.Policy, **{field: value})
      yield f"{field}={value!r}", make, TypeError, here
    for value in ("float", "double", "float64", "f64", "fp64"):
      make = functools.partial(mpjax.Policy, **{field: value})
      yield f"{field}={value!r}", make, ValueError, here
    for value in misspelt(DTYPES, rng, 12):
      make = functools.partial(mpjax.Policy, **{field: value})
      yield f"{field}={value!r}", make, ValueError, here, repr(value)
    if field != "param_dtype":
      for value in ("float8_e4m3fn", "float8_e5m2", jnp.float8_e4m3b11fnuz):
        make = functools.partial(mpjax.Policy, **{field: value})
        yield f"{field}={value!r}", make, TypeError, here, "float8"
  for compute in ("float32", "bfloat16", "float16"):
    for wide in {"bfloat16", "float16"} - {compute}:
      make = functools.partial(mpjax.Policy, compute_dtype=compute, weight_grad_dtype=wide)
      here = "mpjax.Policy(weight_grad_dtype=...)"
      yield f"{wide} gradients of {compute}", make, ValueError, here, wide


class Model(nn.Module):
  """A few modules to aim rules at."""

  @nn.compact
  def __call__(self, x):
    for i in range(2):
      x = nn.Dense(2, name=f"layer_{i}")(x)
    return nn.Dense(1, name="head")(x)


def rules(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
  rule = mpjax.Rule
  selectors = {"path": "head", "module": nn.Dense, "where": callable}
  names = list(selectors)
  for chosen in ([], names[:2], names[1:], names[::2], names):
    given = {name: selectors[name] for name in chosen}
    make = functools.partial(rule, "float32", **given)
    yield f"selectors {chosen}", make, ValueError, "mpjax.Rule(...)"
  globs = ["head", "layer_*", "encoder/*/attention", "**/norm", "layer_?", "a/b/c"]
  broken = (
    "/{}",
    "{}/",
    "{}//x",
    "{}[",
    "]{}",
    "({})",
    "{}$",
    "^{}",
    "{}.x",
    "{}|x",
    "{}+",
    "x\\{}",
  )
  for glob in globs:
    for pattern in broken:
      path = pattern.format(glob)
      make = functools.partial(rule, "float32", path=path)
      yield f"glob {path}", make, ValueError, "mpjax.Rule(path=...)", repr(path)
  for field, values in {
    "path": (3, b"head", ["head"], nn.Dense),
    "module": (3, "Dense", (), (nn.Dense, "x"), nn.Dense(2), [nn.Dense]),
    "where": (3, "head", (nn.Dense,)),
  }.items():
    for value in values:
      make = functools.partial(rule, None, **{field: value})
      yield f"{field} {value!r}", make, TypeError, f"Rule({field}=...)"
  for typo in misspelt(PRESETS, rng, 20):
    make = functools.partial(rule, typo, path="head")
    yield f"policy {typo}", make, ValueError, "mpjax.Policy.parse(policy)", repr(typo)

  with_policy = mpjax.linen.with_policy
  for field, values, error in (
    ("rules", (3, "head", [rule(None, path="x"), "y"], [3], rule(None, path="x")), TypeError),
    ("model", (Model, 3, nn.relu, None, {}), TypeError),
    ("unmatched", ("rise", "Raise", None, True), ValueError),
  ):
    for value in values:
      given = {"model": Model(), "policy": "float32", "rules": (), field: value}
      make = functools.partial(with_policy, **given)
      where = f"with_policy({field})" if field == "model" else f"with_policy({field}=...)"
      yield f"{field} {value!r}", make, error, where
  x, key = jax.ShapeDtypeStruct((1, 2), jnp.float32), jax.random.key(0)
  unmatched = [{"path": typo} for typo in misspelt(("head", "layer_0", "layer_1"), rng, 24)]
  unmatched += [{"module": nn.Conv}, {"module": (nn.Conv, nn.BatchNorm)}]
  unmatched += [{"path": re.compile(r"layer_[2-9]")}, {"where": lambda module: False}]
  for selector in unmatched:
    model = with_policy(Model(), "mixed_bfloat16", [rule("float32", **selector)])
    make = functools.partial(jax.eval_shape, model.init, key, x)
    yield f"unmatched {selector}", make, mpjax.UnmatchedRuleError, "rules: Rule(", "none of the"
