"""Risks: what each of them is, that its cure works when pasted, and which networks have none."""

import importlib.util
import json
import re
import textwrap
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.debug.found_risks import INPUT, WEIGHT, kinds
from tests.models import vision
from tests.models.catalogue import MODELS
from tests.models.values import filled, normal, shapes
from tests.programs import relative_error, run

pytestmark = pytest.mark.standard_promotion

DTYPES = ("bfloat16", "float16")


class Mel(nn.Module):
  """A layer on features that a matmul with a constant computes."""

  cured: bool = False

  @nn.compact
  def __call__(self, x):
    bank = jnp.linspace(0, 1, 64 * 32).reshape(64, 32)
    if self.cured:
      mel = x.astype(jnp.bfloat16) @ bank
    else:
      mel = x @ bank
    return nn.Dense(4)(mel)


def test_a_float32_matmul_of_inputs_says_its_share():
  x = jnp.ones((4, 64))
  variables = shapes(Mel(), x)
  (found,) = mpjax.audit(mpjax.with_policy(Mel(), "mixed_bfloat16").apply)(variables, x).risks
  assert (found.kind, found.path) == ("float32 matmul", "Mel")
  assert found.share == pytest.approx(64 * 32 / (64 * 32 + 32 * 4))
  assert found.cure == "mel = x.astype(jnp.bfloat16) @ bank"
  cured = mpjax.with_policy(Mel(cured=True), "mixed_bfloat16")
  audit = mpjax.audit(cured.apply)(variables, x)
  assert (audit.half_share, audit.risks) == (1, ())


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


# The page


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
  variables = shapes(Stack(), INPUT)
  audit = mpjax.audit(mpjax.with_policy(Stack(), "mixed_bfloat16").apply)(variables, INPUT)
  assert len(audit.risks) == 24
  text = str(audit)
  assert text.count("angle ·") == 1
  assert "Rotated_*/Dense_0 (24) · angle · test_risks.py:" in text
  assert max(map(len, text.splitlines())) <= 80
  (cure,) = re.findall(r"mpjax\.Rule\(.*\)", text)
  assert cure == 'mpjax.Rule("float32_highest", path="Rotated_*/Dense_0")'
  model = mpjax.with_policy(Stack(), "mixed_bfloat16", [eval(cure)])
  assert mpjax.audit(model.apply)(variables, INPUT).risks == ()


def test_they_are_in_the_json():
  found = json.loads(
    mpjax.audit(mpjax.autocast(lambda w, x: jnp.sin(x @ w)))(WEIGHT, INPUT).to_json()
  )
  (row,) = found["risks"]
  assert (row["kind"], row["share"]) == ("angle", 1)
  assert row["cure"].startswith("mpjax.full_precision(lambda w, x: jnp.sin(x @ w))")


# Obeying lowers the error


def imported(path, text):
  path.write_text(text)
  spec = importlib.util.spec_from_file_location(path.stem, path)
  found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


HEADER = "import jax, mpjax\nimport jax.numpy as jnp\n"


def obeyed(text, risk):
  """Returns a program with the line of a risk replaced by its cure; a rebound name comes after."""
  lines = text.splitlines()
  number = risk.source.line - 1
  indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
  name = re.match(r"(\w+) = mpjax.full_precision\(\1\)$", risk.cure)
  return "\n".join([*lines[: number + bool(name)], indent + risk.cure, *lines[number + 1 :]]) + "\n"


def errors(tmp_path, text, args, true, by_hand, **options):
  """Returns the errors as written, and obeyed, both over that of dtypes by hand."""
  path = tmp_path / "program.py"
  source = HEADER + text
  ratios = []
  for turn in range(2):
    fn = mpjax.autocast(imported(path.with_stem(f"program_{turn}"), source).fn, **options)
    error = np.linalg.norm(np.asarray(fn(*args), np.float64) - true)
    ratios.append(error / np.linalg.norm(np.asarray(by_hand, np.float64) - true))
    for risk in mpjax.audit(fn)(*args).risks if not turn else ():
      source = obeyed(source, risk)
  assert mpjax.audit(fn)(*args).risks == ()
  return ratios


POINTS = (
  np.array([[3.1, 1.3, 2.7, 0.9, 0, 0, 0, 0], [0.0, 1.0, 0.0, 1.0, 0, 0, 0, 0]]),
  np.array([[3.2, 1.3, 2.7, 0.9, 0, 0, 0, 0], [1.0, 0.0, 0.0, 0.0, 0, 0, 0, 0]]),
)
DISTANCE = textwrap.dedent(
  """
  def fn(w, a, b):
    a = a @ w
    b = b @ w
    d = (a * a).sum(-1)[:, None] - 2 * a @ b.T + (b * b).sum(-1)[None]
    return {result}
  """
)


def squared_distance(a, b):
  return (a * a).sum(-1)[:, None] - 2 * a @ b.T + (b * b).sum(-1)[None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  "result",
  ["jnp.sqrt(d)[0, 0]", "jnp.exp(-d)[0, 0]", "jnp.maximum(1 - d, 0)[0, 0]", "d[0].mean()"],
)
def test_an_expanded_distance(tmp_path, result, dtype):
  of = lambda d: eval(result, {"d": d, "jnp": np})  # noqa: E731
  layer = [x.astype(dtype).astype("float32") for x in POINTS]
  args = (np.eye(8, dtype="float32"), *(x.astype("float32") for x in POINTS))
  by_hand, true = (of(squared_distance(*points)) for points in (layer, POINTS))
  text = DISTANCE.format(result=result)
  before, after = errors(tmp_path, text, args, true, by_hand, policy=f"mixed_{dtype}")
  assert not before <= 1.1
  assert after <= 1.1


def test_a_distance_that_is_returned_is_none():
  def distance(w, a, b):
    return squared_distance(a @ w, b @ w)

  assert kinds(distance, jnp.eye(8), jnp.ones((2, 8)), jnp.ones((2, 8))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_angle_by_a_matmul(tmp_path, dtype):
  text = textwrap.dedent(
    """
    def fn(w, x):
      p = 20 * x @ w
      return jnp.sin(p)
    """
  )
  true = np.sin(20 * np.float64(INPUT) @ np.float64(WEIGHT))
  by_hand = jnp.sin(20 * jnp.asarray(INPUT) @ WEIGHT)
  policy = f"mixed_{dtype}"
  before, after = errors(tmp_path, text, (WEIGHT, INPUT), true, by_hand, policy=policy)
  assert before > 10
  assert after <= 1.1


def test_a_lookup(tmp_path):
  text = textwrap.dedent(
    """
    table = jnp.array([0.0, 999.4937, 0.9999, 1.0, 2.0, 3.0, 4.0, 5.0])
    def fn(i):
      return jax.nn.one_hot(i, 8) @ table
    """
  )
  source = HEADER + text
  index, right = jnp.array([1, 2]), np.float32([999.4937, 0.9999])
  fn = mpjax.autocast(imported(tmp_path / "before.py", source).fn)
  assert not np.array_equal(fn(index), right)
  (risk,) = mpjax.audit(fn)(index).risks
  fn = mpjax.autocast(imported(tmp_path / "after.py", obeyed(source, risk)).fn)
  np.testing.assert_array_equal(fn(index), right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_local_variance(tmp_path, dtype):
  text = textwrap.dedent(
    """
    k = jnp.ones(11) / 11
    fn = lambda x: (jnp.convolve(x * x, k, "valid") - jnp.convolve(x, k, "valid") ** 2)[5]
    """
  )
  x = np.full(33, 0.6)
  x[::2] += 0.03

  def variance(x):
    k = np.ones(11, x.dtype) / x.dtype.type(11)
    return (np.convolve(x * x, k, "valid") - np.convolve(x, k, "valid") ** 2)[5]

  x32, options = x.astype("float32"), {"policy": f"mixed_{dtype}", "data_argnums": 0}
  before, after = errors(tmp_path, text, (x32,), variance(x), variance(x32), **options)
  assert before > 100
  assert after <= 1.1


# A program whose line `h` rounds what it magnifies, in float16; and its result in float64.
MAGNIFIED = {
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
  "denominator": ("1e4 / (h - 2048)", lambda h: 1e4 / (h - 2048)),
}


@pytest.mark.filterwarnings("ignore:.*takes the result of low-precision")
@pytest.mark.parametrize("kind", MAGNIFIED)
def test_a_region_around_the_rounding_ends_each_kind_of_risk(tmp_path, kind):
  result, exact = MAGNIFIED[kind]
  text = f"def fn(w, x):\n  h = x @ w\n  return {result}\n"
  source, path = HEADER + text, tmp_path / "program.py"
  x = np.array([[2048.7, 2048.9, 1.0], [2049.2, 2047.9, 7.0], [3.0, 5.0, 2048.4]])
  args = jnp.eye(8, 3), jnp.asarray(x @ np.eye(3, 8), "float32")
  found = []
  for turn in range(3):
    fn = mpjax.autocast(imported(path.with_stem(f"{turn}"), source).fn, "mixed_float16")
    found.append(np.abs(np.asarray(fn(*args)) - exact(x)).max())
    risks = mpjax.audit(fn)(*args).risks
    if not turn:
      assert {risk.kind for risk in risks} == {kind}
    for risk in risks:
      source = obeyed(source, risk)
  assert risks == ()
  assert found[-1] < 0.1 * found[0]


class Winner(nn.Module):
  half: Any = None

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm(use_scale=False, use_bias=False)(x)
    m = h == h.max(-1, keepdims=True)
    return nn.Dense(4, use_bias=False, dtype=self.half)(h * m)


class Router(nn.Module):
  @nn.compact
  def __call__(self, x):
    return jax.nn.softmax(nn.Dense(64, use_bias=False)(x))


class TopTwo(nn.Module):
  half: Any = None

  @nn.compact
  def __call__(self, x):
    p = Router()(x)
    m = p >= jax.lax.top_k(p, 2)[0][:, -1:]
    return nn.Dense(8, use_bias=False, dtype=self.half)(jnp.where(m, p, 0.0))


def pasted(cure):
  # Apart: `eval` in a comprehension ends Python 3.13.0.
  return eval(cure)


def errors_of(models, variables, x):
  """Returns the relative errors of all models but the first, against that."""
  want, *found = run(lambda variables, x: [m.apply(variables, x) for m in models], variables, x)
  return [relative_error(got, want) for got in found]


@pytest.mark.parametrize("model", [Winner, TopTwo])
def test_comparisons_of_a_norm_and_of_a_router(model):
  x = normal(256, 16)
  variables = filled(shapes(model(), x))
  policied = mpjax.with_policy(model(), "mixed_bfloat16")
  found = mpjax.audit(policied.apply)(variables, x).risks
  assert {x.kind for x in found} == {"comparison"}
  cured = mpjax.with_policy(model(), "mixed_bfloat16", [pasted(x.cure) for x in found])
  versions = (model(), model(jnp.bfloat16), policied, cured)
  by_hand, low, mended = errors_of(versions, variables, x)
  assert low > 11 * by_hand
  assert mended <= 1.1 * by_hand
  assert mpjax.audit(cured.apply)(variables, x).risks == ()


class Shifted(nn.Module):
  """Return positions far from 0, whose differences are small."""

  @nn.compact
  def __call__(self, t):
    return t * 1.5 + 300


class Differences(nn.Module):
  half: Any = None

  @nn.compact
  def __call__(self, t):
    p = Shifted()(t)
    return nn.Dense(8, dtype=self.half)((p[:, None] - p[None]).reshape(-1, 3))


class FastVariance(nn.Module):
  """Of review_num.py: a norm by E[x^2] - E[x]^2."""

  half: Any = None

  @nn.compact
  def __call__(self, x):
    h = nn.Dense(64, dtype=self.half)(x).astype("float32")
    mean = h.mean(-1, keepdims=True)
    variance = (h * h).mean(-1, keepdims=True) - mean * mean
    return nn.Dense(16, dtype=self.half)((h - mean) * jax.lax.rsqrt(variance + 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", [Differences, FastVariance])
def test_differences_that_lose_nothing_are_none(model, dtype):
  x = normal(32, 3) + 100
  variables = filled(shapes(model(), x))
  policied = mpjax.with_policy(model(), f"mixed_{dtype}")
  assert mpjax.audit(policied.apply)(variables, x).risks == ()
  by_hand, low = errors_of((model(), model(jnp.dtype(dtype)), policied), variables, x)
  assert low <= 1.1 * by_hand


# Ordinary networks have none


def rotary(x):
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
  cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
  left, right = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


class Block(nn.Module):
  rope: bool

  @nn.compact
  def __call__(self, x):
    h = nn.RMSNorm()(x)
    q, k, v = (nn.DenseGeneral((2, 8))(h) for _ in range(3))
    if self.rope:
      q, k = rotary(q), rotary(k)
    x = x + nn.DenseGeneral(16, axis=(-2, -1))(
      jax.nn.dot_product_attention(q, k, v, is_causal=True)
    )
    h = nn.RMSNorm()(x)
    return x + nn.Dense(16)(jax.nn.silu(nn.Dense(32)(h)) * nn.Dense(32)(h))


class Gpt(nn.Module):
  rope: bool = True

  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(17, 16)
    x = embed(ids)
    for _ in range(2):
      x = nn.Dropout(0.1, deterministic=False)(Block(self.rope)(x))
    return embed.attend(nn.RMSNorm()(x))


class Experts(nn.Module):
  """Each token to the two experts of the largest gates."""

  @nn.compact
  def __call__(self, x):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(x)), 2)
    gates = gates / gates.sum(-1, keepdims=True)
    weights = (jax.nn.one_hot(chosen, 4) * gates[..., None]).sum(-2)
    up = self.param("up", nn.initializers.lecun_normal(), (4, 16, 32))
    down = self.param("down", nn.initializers.lecun_normal(), (4, 32, 16))
    return jnp.einsum("te,ted->td", weights, jnp.einsum(
      "tef,efd->ted", jax.nn.gelu(jnp.einsum("td,edf->tef", x, up)), down
    ))  # fmt: skip


class Resnet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2))
    h = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
    x = nn.relu(x + nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(h)))
    return nn.Dense(10)(x.mean((1, 2)))


class Recurrent(nn.Module):
  @nn.compact
  def __call__(self, ids):
    return nn.Dense(17)(nn.RNN(nn.OptimizedLSTMCell(16))(nn.Embed(17, 16)(ids)))


IDS = np.arange(16).reshape(2, 8)
IMAGES = normal(3, 8, 8, 3)
NETWORKS = {
  "gpt_rope": (Gpt(), IDS),
  "gpt": (Gpt(rope=False), IDS),
  "experts": (Experts(), jnp.ones((6, 16))),
  "resnet": (Resnet(), IMAGES),
  "lstm": (Recurrent(), IDS),
  "vit": (vision.Vit(), normal(3, 16, 8, 3)),
  "unet": (vision.UNet(), IMAGES, jnp.ones(3)),
  "vae": (vision.VAE.linen(None), IMAGES),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_an_ordinary_network_has_none(name, dtype):
  model, *inputs = NETWORKS[name]
  key = jax.random.key(0)
  rngs = {"params": key, "dropout": key}
  variables = jax.eval_shape(model.init, rngs, *inputs)
  policied = mpjax.with_policy(model, f"mixed_{dtype}")

  def loss(params, *inputs):
    out, _ = policied.apply(
      {**variables, "params": params}, *inputs, rngs=rngs, mutable=["batch_stats"]
    )
    if jax.tree.leaves(out)[0].shape[-1] == 17:
      return -jax.nn.log_softmax(out).mean()
    return sum(jnp.square(x.astype("float32")).mean() for x in jax.tree.leaves(out))

  variables = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), dict(variables))
  params = variables.pop("params")
  assert mpjax.audit(jax.value_and_grad(loss))(params, *inputs).risks == ()


# It cuts its input into patches by a convolution with a constant kernel, in float32 as all inputs.
EXPECTED = {"linen/conv_local": ["float32 matmul"]}


@pytest.mark.accuracy
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("function/shard")])
def test_no_model_of_the_catalogue_has_one_that_is_not_expected(name):
  model = MODELS[name]
  for way in {"with_policy", "autocast"} & {*model.ways}:
    found = mpjax.audit(model.call(way, "mixed_float16"))(*model.arguments())
    assert [risk.kind for risk in found.risks] == EXPECTED.get(name, [])
