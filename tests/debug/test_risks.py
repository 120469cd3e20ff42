"""Risks: what each of them is, that its cure works when pasted, and which networks have none."""

import importlib.util
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.models.catalogue import MODELS
from tests.programs import relative_error

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.key(0)
WEIGHT = jax.random.normal(KEY, (8, 8)) / 3
INPUT = jax.random.normal(jax.random.key(1), (4, 8))


def risks(fn, *args, policy="mixed_bfloat16", **options):
  return mpjax.audit(mpjax.autocast(fn, policy, **options))(*(args or (WEIGHT, INPUT))).risks


def kinds(fn, *args, **options):
  return [x.kind for x in risks(fn, *args, **options)]


# Sinks


@pytest.mark.parametrize("fn", [jnp.sin, jnp.cos, jnp.arccos])
def test_an_angle(fn):
  assert kinds(lambda w, x: fn(x @ w)) == ["angle"]
  assert kinds(lambda w, x: fn(jnp.tanh(x @ w))) == []
  assert kinds(lambda w, x: (x @ w) * fn(x)) == []


def test_an_index_or_an_integer():
  assert kinds(lambda w, x: WEIGHT[(x @ w).astype(int)]) == ["index"]
  assert kinds(lambda w, x: jnp.floor(jnp.clip(x @ w, 0, 7)).astype("int32")) == ["index"]
  assert kinds(lambda w, x: (x @ w) % 1.0) == ["index"]
  assert kinds(lambda w, x: x @ w - jnp.floor(x @ w)) == []

  def wrapped(w, x):
    p = x @ w
    return p - jnp.round(p / 3) * 3

  assert kinds(wrapped) == ["index"]


def test_a_print_is_no_sink():
  def fn(w, x):
    y = x @ w
    jax.debug.print("{}", y)
    return jnp.sin(y)

  assert kinds(fn) == ["angle"]


def test_quantized_values_and_choices_are_no_indices():
  assert kinds(lambda w, x: jnp.round(x @ w).astype("int8")) == []
  assert kinds(lambda w, x: jnp.argmax(x @ w, -1)) == []
  assert kinds(lambda w, x: jax.nn.one_hot(jax.lax.top_k(x @ w, 2)[1], 8)) == []
  assert kinds(lambda w, x: (x @ w > 0).astype(int)) == []


def test_a_comparison_with_an_order_of_the_same_value():
  def winners(w, x):
    h = x @ w
    return jnp.where(h == h.max(-1, keepdims=True), h, 0)

  def largest(w, x):
    p = jax.nn.softmax(x @ w)
    return p * (p >= jax.lax.top_k(p, 2)[0][:, -1:])

  assert kinds(winners) == ["comparison"]
  assert kinds(largest) == ["comparison"]
  assert kinds(lambda w, x: jax.nn.relu(x @ w)) == []
  assert kinds(lambda w, x: jnp.where(x @ w > 0.5, x @ w, 0)) == []
  # Its derivative compares with the maximum, too.
  assert kinds(jax.grad(lambda w, x: jnp.max(x @ w, axis=-1).sum())) == []


def test_a_float32_matmul_on_purpose_ends_the_search():
  def fn(w, x):
    h = x @ w
    gate = mpjax.full_precision(lambda: h @ w)()
    return gate == gate.max(-1, keepdims=True), jnp.linalg.qr(gate), jnp.sin(gate)

  assert kinds(fn) == []


def test_a_complex_exponential():
  assert kinds(lambda w, x: jnp.exp(1j * (x @ w))) == ["complex exponential"]
  assert kinds(lambda w, x: jnp.exp(x @ w)) == []
  assert kinds(lambda w, x: jnp.real(2j * (x @ w) + x)) == []


@pytest.mark.parametrize(
  "fn", [jnp.linalg.cholesky, jnp.linalg.inv, jnp.linalg.eigh, jnp.linalg.qr]
)
def test_linear_algebra(fn):
  def solved(w, x):
    h = jnp.tanh(x @ w)
    return fn(h @ h.T + jnp.eye(4))

  with pytest.warns(UserWarning, match="takes the result of low-precision matmuls"):
    found = risks(solved)
  assert {x.kind for x in found} == {"linear algebra"}
  assert {x.cure for x in found} == {
    "return mpjax.full_precision(lambda: fn(h @ h.T + jnp.eye(4)))()"
  }
  assert kinds(lambda w: fn(w + jnp.eye(8)), WEIGHT) == []


def test_a_difference_of_squares():
  def distance(w, x):
    h = x @ w
    return jnp.sqrt((h * h).sum(-1)[:, None] - 2 * h @ h.T + (h * h).sum(-1)[None])

  def negated(w, x):
    h = x @ w
    return jnp.sqrt((-2 * h) @ h.T + ((h * h).sum(-1)[:, None] + (h * h).sum(-1)[None]))

  def kernel(w, x):
    h = jnp.tanh(x @ w)
    return jnp.exp(2 * h @ h.T - (h * h).sum(-1)[:, None] - (h * h).sum(-1)[None])

  def codebook(w, x):
    h = x @ w
    return jnp.argmin((h * h).sum(-1)[:, None] - 2 * h @ w.T + (w * w).sum(-1)[None], axis=-1)

  assert kinds(distance) == ["difference"]
  assert kinds(kernel) == ["difference"]
  assert kinds(codebook) == ["difference"]
  assert kinds(negated) == ["difference"]
  # Both sides have the same roundings.
  assert kinds(lambda w, x: jnp.var(x @ w, axis=-1)) == []
  assert kinds(lambda w, x: ((x @ w) ** 2).mean(-1) - (x @ w).mean(-1) ** 2) == []
  # A residual, a loss, and a distance that is returned.
  assert kinds(lambda w, x: x - x @ w) == []
  assert kinds(lambda w, x: ((x - x @ w) ** 2).mean()) == []


def test_a_denominator_in_float16():
  def ratio(w, x):
    return x / (x @ w + 1e-6)

  assert kinds(ratio, policy="mixed_float16") == ["denominator"]
  assert kinds(ratio) == []
  attended = lambda w, x: jax.nn.softmax((x @ w) @ x.T / jnp.sqrt(jnp.float32(8)))  # noqa: E731
  assert kinds(attended, policy="mixed_float16") == []
  assert kinds(lambda w, x: (x @ w) / (x @ w).sum(), policy="mixed_float16") == []


def test_a_mask_that_selects_from_a_table():
  table = jnp.linspace(0, 999.4937, 8)
  assert kinds(lambda i: jax.nn.one_hot(i, 8) @ table, jnp.array([1, 2])) == ["lookup"]
  assert kinds(lambda i: table[i], jnp.array([1, 2])) == []
  # Activations have been rounded before.
  dispatch = lambda w, x, i: jax.nn.one_hot(i, 4) @ jnp.tanh(x @ w)  # noqa: E731
  assert kinds(dispatch, WEIGHT, INPUT, jnp.array([1, 2])) == []


def test_no_cure_lowers_a_float32_matmul_that_low_precision_would_harm():
  def features(w, x):
    return jnp.sin(x @ jnp.linspace(0, 9, 64).reshape(8, 8)) @ w

  audit = mpjax.audit(mpjax.autocast(features, "mixed_bfloat16", data_argnums=1))(WEIGHT, INPUT)
  assert audit.half_share < 1
  assert audit.risks == ()


def test_without_a_policy_or_in_float32_there_are_none():
  fn = lambda w, x: jnp.sin(x @ w)  # noqa: E731
  assert mpjax.audit(fn)(WEIGHT, INPUT).risks == ()
  assert mpjax.audit(fn)(WEIGHT.astype("bfloat16"), INPUT.astype("bfloat16")).risks == ()
  assert kinds(mpjax.full_precision(fn)) == []
  assert kinds(fn, policy="float32") == []


def test_a_loop_is_walked_through():
  def rotated(w, x):
    step = lambda carry, _: ((jnp.sin(carry[1]), carry[0] @ w), None)  # noqa: E731
    return jax.lax.scan(step, (x, x), None, length=3)[0]

  assert kinds(rotated) == ["angle"]


def test_a_loop_that_carries_an_argument_ends():
  def carried(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[0], jnp.tanh(c[1] @ c[0])), (w, x))

  assert kinds(carried) == []


class Mel(nn.Module):
  """A layer on features that a matmul with a constant computes."""

  is_cured: bool = False

  @nn.compact
  def __call__(self, x):
    bank = jnp.linspace(0, 1, 64 * 32).reshape(64, 32)
    if self.is_cured:
      mel = x.astype(jnp.bfloat16) @ bank
    else:
      mel = x @ bank
    return nn.Dense(4)(mel)


def test_the_cure_of_a_float32_matmul_of_inputs_lowers_it():
  x = jnp.ones((4, 64))
  variables = Mel().init(KEY, x)
  audit, cured = (
    mpjax.audit(mpjax.with_policy(Mel(is_cured), "mixed_bfloat16").apply)(variables, x)
    for is_cured in (False, True)
  )
  (found,) = audit.risks
  assert (found.kind, found.path) == ("float32 matmul", "Mel")
  assert found.share == pytest.approx(64 * 32 / (64 * 32 + 32 * 4))
  assert found.cure == "mel = x.astype(jnp.bfloat16) @ bank"
  assert (cured.half_share, cured.risks) == (1, ())


# Rules and regions that a report advises.


class Rotated(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + jnp.sin(nn.Dense(8)(x))


class Stack(nn.Module):
  @nn.compact
  def __call__(self, x):
    for _ in range(24):
      x = Rotated()(x)
    return nn.Dense(8)(nn.LayerNorm()(x))


def test_24_layers_are_one_row_whose_rule_cures_all():
  variables = Stack().init(KEY, INPUT)
  audit = mpjax.audit(mpjax.with_policy(Stack(), "mixed_bfloat16").apply)(variables, INPUT)
  assert len(audit.risks) == 24
  text = str(audit)
  assert text.count("angle ·") == 1
  assert re.search(r"Rotated_\*/Dense_0 \(24\) · angle · test_risks.py:\d+ · 96.0 % of FLOPs", text)
  (cure,) = re.findall(r"mpjax\.Rule\(.*\)", text)
  assert cure == 'mpjax.Rule("float32", path="Rotated_*/Dense_0")'
  model = mpjax.with_policy(Stack(), "mixed_bfloat16", [eval(cure)])
  assert mpjax.audit(model.apply)(variables, INPUT).risks == ()
  row = json.loads(audit.to_json())["risks"][0]
  assert (row["kind"], row["cure"]) == ("angle", 'mpjax.Rule("float32", path="Rotated_0/Dense_0")')


class Winner(nn.Module):
  half: object = None

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm()(x)
    m = h == h.max(-1, keepdims=True)
    return nn.Dense(4, use_bias=False, dtype=self.half)(h * m)


def test_the_rule_for_a_rounded_norm_makes_a_comparison_as_exact_as_dtypes_by_hand():
  x = jax.random.normal(KEY, (256, 16))
  variables = Winner().init(KEY, x)
  exact, by_hand = (Winner(half).apply(variables, x) for half in (None, jnp.bfloat16))
  policied = mpjax.with_policy(Winner(), "mixed_bfloat16")
  (found,) = mpjax.audit(policied.apply)(variables, x).risks
  assert found.kind == "comparison"
  cured = mpjax.with_policy(Winner(), "mixed_bfloat16", [eval(found.cure)])
  limit = 1.1 * relative_error(by_hand, exact)
  assert relative_error(policied.apply(variables, x), exact) > 10 * limit
  assert relative_error(cured.apply(variables, x), exact) <= limit
  assert mpjax.audit(cured.apply)(variables, x).risks == ()


def imported(path, text):
  path.write_text(text)
  spec = importlib.util.spec_from_file_location(path.stem, path)
  found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


HEADER = "import jax, mpjax\nimport jax.numpy as jnp\n"


def obeyed(text, risk):
  """Returns a program with the line of a risk replaced by its cure."""
  lines = text.splitlines()
  number = risk.source.line - 1
  indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
  return "\n".join([*lines[:number], indent + risk.cure, *lines[number + 1 :]]) + "\n"


def distance(h):
  squares = (h * h).sum(-1)
  return squares[:, None] - 2 * h @ h.T + squares[None]


def of_table(_):
  return np.array([999.4937, 0.9999, 0])


# What a program returns of `h`, which it rounds to float16; the same in float64.
MAGNIFIED = {
  "angle": ("jnp.sin(h)", np.sin),
  "index": (
    "jnp.floor(jnp.sum(h, axis=-1)).astype(jnp.int32)",
    lambda h: np.floor(h.sum(-1)),
  ),
  "comparison": (
    "(h == h.max(-1, keepdims=True)).sum(-1)",
    lambda h: (h == h.max(-1, keepdims=True)).sum(-1),
  ),
  "complex exponential": ("jnp.exp(1j * h).real", np.cos),
  "linear algebra": ("jnp.linalg.inv(h)", np.linalg.inv),
  "difference": (
    "jnp.maximum((h * h).sum(-1)[:, None] - 2 * h @ h.T + (h * h).sum(-1)[None], 0)",
    distance,
  ),
  "denominator": ("1e4 / (h - 2048)", lambda h: 1e4 / (h - 2048)),
  "lookup": (
    "jax.nn.one_hot(jnp.arange(3), 3) @ jnp.array([999.4937, 0.9999, 0])",
    of_table,
  ),
}
FAR = np.array([[2048.7, 2048.9, 1.0], [2049.2, 2047.9, 7.0], [3.0, 5.0, 2048.4]])
NEAR = np.array([[3.1, 1.3, 2.7], [3.2, 1.3, 2.7], [3.3, 1.3, 2.8]], np.float16).astype(float)


@pytest.mark.filterwarnings("ignore:.*takes the result of low-precision")
@pytest.mark.parametrize("kind", MAGNIFIED)
def test_a_region_around_the_rounding_ends_each_kind_of_risk(tmp_path, kind):
  result, exact = MAGNIFIED[kind]
  source = f"{HEADER}def fn(w, x):\n  h = x @ w\n  return {result}\n"
  x = NEAR if kind == "difference" else FAR
  found = []
  for turn in range(3):
    fn = imported(tmp_path / f"program_{turn}.py", source).fn
    fn = mpjax.autocast(fn, "mixed_float16")
    args = jnp.eye(3), jnp.asarray(x, "float32")
    found.append(np.abs(np.asarray(fn(*args)) - exact(x)).max())
    risks = mpjax.audit(fn)(*args).risks
    if not turn:
      assert {risk.kind for risk in risks} == {kind}
    for risk in risks:
      source = obeyed(source, risk)
  assert risks == ()
  assert found[-1] < 0.1 * found[0]


@pytest.mark.accuracy
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("function/shard")])
def test_no_model_of_the_catalogue_has_one(name):
  model = MODELS[name]
  for way in {"with_policy", "autocast"} & {*model.ways}:
    found = mpjax.audit(model.call(way, "mixed_float16"))(*model.arguments())
    assert found.risks == ()
