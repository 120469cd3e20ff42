import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._diagnose.ranges.ranges import add
from tests.diagnose.test_optimizer_work import W, X, adversarial
from tests.models.values import filled, normal, shapes


def exponents(x):
  """Returns how many finite nonzero numbers have which exponent."""
  x = np.asarray(x).astype(np.float64).reshape(-1)
  x = x[np.isfinite(x) & (x != 0)]
  return dict(collections.Counter((np.frexp(x)[1] - 1).tolist()))


def fates(x, name):
  """Returns how many finite nonzero numbers become what in a narrow dtype, by casting them."""
  x = np.asarray(x)
  wide = x.astype(np.float64).reshape(-1)
  kept = np.isfinite(wide) & (wide != 0)
  with np.errstate(all="ignore"):
    narrow = x.reshape(-1)[kept].astype(jnp.dtype(name)).astype(np.float64)
  tiny = float(jnp.finfo(name).smallest_normal)
  return {
    "zero": int(np.sum(narrow == 0)),
    "subnormal": int(np.sum((narrow != 0) & (np.abs(narrow) < tiny))),
    "overflow": int(np.sum(~np.isfinite(narrow))),
  }


def awkward(dtype):
  """Returns numbers of a dtype at and beside all borders, subnormal ones, zeros, inf and NaN."""
  dtype = jnp.dtype(dtype)
  powers = np.ldexp(1.0, np.arange(-1074, 1024, dtype=np.int64))
  borders = [1 + 2.0**-23, 1.5, 1.75, 1.96875, 1 - 2.0**-24, 1.8125, 1.9997]
  exact = np.concatenate([powers, *(b * powers for b in borders)])
  special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 448, 464, 465, 57344, 61440]
  with np.errstate(all="ignore"):
    return np.concatenate([exact, -exact[::3], special]).astype(dtype)


def group(report, kind, path):
  (found,) = [g for g in report.of(kind) if g.path == path]
  return found


def check_equal(group, x):
  assert group.exponents == exponents(x)
  assert group.lost == {name: fates(x, name) for name in group.lost}
  assert group.total == np.size(x)


def test_every_number_of_a_function_is_counted_exactly():
  w = jax.random.normal(jax.random.key(0), (8, 3)) * 2.0**-30
  x = jax.random.normal(jax.random.key(1), (8, 8))

  def loss(w, x):
    with jax.named_scope("layer"):
      y = x @ w
    with jax.named_scope("end"):
      return jnp.sum(y * y)

  gradient = jax.grad(loss)(w, x)
  report = mpjax.ranges(loss)(w, x)
  check_equal(group(report, "activations", "layer"), x @ w)
  check_equal(group(report, "gradients", "layer"), gradient)
  check_equal(group(report, "parameters", "w"), w)
  assert not report.of("updates")
  assert np.isnan(report.lost_updates)
  # A gradient is not differentiated again.
  again = mpjax.ranges(jax.value_and_grad(loss))(w, x)
  check_equal(group(again, "gradients", "layer"), gradient)


def test_what_a_loop_carries_is_counted_as_if_it_were_written_out():
  def written_out(w, x):
    h = x @ w
    for _ in range(4):
      h = jnp.tanh(h @ w) * 3
    return h @ w

  def looped(w, x):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) * 3, None), x @ w, length=4)
    return h @ w

  reports = [mpjax.ranges(f)(jnp.eye(8) / 3, jnp.ones((8, 8))) for f in (written_out, looped)]
  # A carry stays in float32 where written out code rounds, so the kinds differ.
  out, loop = (sum((g.exponents for g in r.groups), collections.Counter()) for r in reports)
  assert loop == out


def test_lost_updates_equal_those_of_numpy():
  params = {"a": jax.random.normal(jax.random.key(0), (50,), jnp.bfloat16)}
  updates = {"a": jax.random.normal(jax.random.key(1), (50,), jnp.bfloat16) * 0.01}
  updates["a"] = updates["a"].at[:5].set(0)
  report = mpjax.ranges(jax.jit(optax.apply_updates))(params, updates)
  p, u = np.asarray(params["a"]), np.asarray(updates["a"])
  lost = np.sum((p + u == p) & (u != 0))
  assert 0 < lost < 45
  found = group(report, "updates", "params/a")
  assert (found.lost_updates, found.zero) == (lost, 5)
  check_equal(found, u)
  assert report.lost_updates == lost / 45
  sparse = mpjax.ranges(lambda p, u: p.at[np.arange(50)].add(u))
  assert sparse(params["a"], updates["a"]).lost_updates == lost / 45


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(8, name="first")(x))
    return nn.Dense(2, name="last")(x)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_training_step_with_a_loss_scale():
  model, x = Model(), normal(8, 8)
  variables = filled(shapes(model, x))
  tx = mpjax.loss_scaling(optax.adam(1e-3), mpjax.StaticLossScale(1024))

  @jax.jit
  def step(variables, opt_state, x):
    def loss(variables):
      return 1e-6 * jnp.mean(model.apply(variables, x) ** 2)

    _, grads = jax.value_and_grad(mpjax.scaled(loss, opt_state))(variables)
    updates, opt_state = tx.update(grads, opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state

  report = mpjax.ranges(step)(variables, tx.init(variables), x)
  assert report.loss_scale_in_use == 1024
  plain = mpjax.ranges(lambda v, x: 1e-6 * jnp.mean(model.apply(v, x) ** 2))(variables, x)
  assert (plain.loss_scale or 0) > 2**15
  assert report.loss_scale == plain.loss_scale  # Not that of the loss itself.
  for path in ("Model/first", "Model/last"):
    scaled, own = (group(r, "gradients", path) for r in (report, plain))
    assert scaled.exponents == {e + 10: n for e, n in own.exponents.items()}
  assert {g.path for g in report.of("parameters")} == {
    f"variables/params/{layer}/{leaf}" for layer in ("first", "last") for leaf in ("kernel", "bias")
  }
  assert report.of("updates")
  assert report.lost_updates == 0


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_scale_of_a_state_that_the_function_creates_is_found():
  x, tx = jnp.ones((8, 8)), mpjax.loss_scaling(optax.sgd(1e-3))

  def loss_fn(params):
    return jnp.mean((x @ params["w"]) ** 2)

  def step(params, opt_state):
    _, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params)
    return optax.apply_updates(params, tx.update(grads, opt_state, params)[0])

  params = {"w": jnp.full((8, 8), 0.1)}
  inside = mpjax.ranges(lambda params: step(params, tx.init(params)))(params)
  outside = mpjax.ranges(step)(params, tx.init(params))
  assert inside.loss_scale_in_use == outside.loss_scale_in_use == 2**15
  assert inside.loss_scale == outside.loss_scale
  # The state of an optimizer whose gradients are not scaled says nothing about them.
  plain = mpjax.ranges(lambda params, opt_state: jax.grad(loss_fn)(params))
  assert plain(params, tx.init(params)).loss_scale_in_use is None


def attention(w, x):
  q = x @ w
  scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), q @ q.T / 8, -1e9)
  return jax.nn.softmax(scores) @ q


@pytest.mark.slow
def test_masks_and_float32_softmax_are_no_losses():
  w = jax.random.normal(jax.random.key(0), (8, 8))
  x = jax.random.normal(jax.random.key(1), (16, 8)) / 4
  report = mpjax.ranges(attention)(w, x)
  (low,), (wide,) = report.of("activations"), report.of("float32")
  assert jnp.all(jnp.isfinite(attention(w.astype("float16"), x.astype("float16"))))
  assert low.lost["float16"] == {
    "zero": 0,
    "subnormal": low.lost["float16"]["subnormal"],
    "overflow": 0,
  }
  assert wide.lost["float16"]["overflow"] >= 120  # Half of the scores.
  assert low.largest < 100


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_moments_are_optimizer_state_in_any_argument():
  tx = mpjax.loss_scaling(optax.adam(1e-3), mpjax.StaticLossScale(8))
  params = {"w": jax.random.normal(jax.random.key(0), (4, 3))}
  batch = {"x": jnp.ones((2, 4)), "y": jnp.ones((2, 3)), "unread": jnp.ones(2)}

  def step(params, opt_state, ema, batch):
    loss = lambda params: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)  # noqa: E731
    _, grads = jax.value_and_grad(mpjax.scaled(loss, opt_state))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, optax.incremental_update(params, ema, 0.1)

  state = jax.jit(step)(params, tx.init(params), params, batch)
  apart = mpjax.ranges(step)(*state, batch)
  together = mpjax.ranges(lambda state, batch: step(*state, batch))(state, batch)
  moments = [optax.tree.get(state[1], name)["w"] for name in ("mu", "nu")]
  for report in (apart, together):
    groups = (*report.of("parameters"), *report.of("optimizer state"))
    for group, x in zip(groups, (state[0]["w"], *moments, state[2]["w"]), strict=True):
      check_equal(group, x)
  ends = [(g.path.split("/")[0], *g.path.split("/")[-2:]) for g in apart.of("optimizer state")]
  assert ends == [("opt_state", "mu", "w"), ("opt_state", "nu", "w"), ("ema", "ema", "w")]


def test_two_networks_have_rows_of_their_parameters_and_updates():
  report = mpjax.ranges(adversarial)(W, W, X)
  for kind in ("parameters", "updates"):
    assert [group.path for group in report.of(kind)] == ["w", "v"]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_masters_take_the_updates_that_half_parameters_would_lose():
  params = {"w": jnp.ones(8, jnp.bfloat16)}
  grads = {"w": jnp.full(8, 1e-4, jnp.float32)}

  def step(tx, exactly):
    def one(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return mpjax.apply_updates(params, updates, opt_state if exactly else None), opt_state

    return one

  plain, wide = optax.sgd(1.0), mpjax.master_weights(optax.sgd(1.0))
  lossy = mpjax.ranges(lambda p, s, g: optax.apply_updates(p, plain.update(g, s, p)[0]))
  assert lossy(params, plain.init(params), grads).lost_updates == 1
  noise = {"rounding": "stochastic", "key": jax.random.key(0)}
  assert not mpjax.ranges(mpjax.apply_updates)(params, grads, **noise).of("updates")
  for exactly in (True, False):
    report = mpjax.ranges(step(wide, exactly))(params, wide.init(params), grads)
    assert report.lost_updates == 0
    assert [g.path for g in report.of("updates")] == ["opt_state/master/w"]


@pytest.mark.slow
def test_each_remedy_for_lost_updates_moves_the_parameters():
  """Half of the last place is rounded away; the advice is the parenthesis of the report."""
  params, tx = {"w": jnp.ones(256, jnp.bfloat16)}, optax.sgd(1.0)
  grads, steps = {"w": jnp.full(256, 1e-3)}, 8
  key = jax.random.key(0)

  def trained(params, tx, rounding):
    opt_state = tx.init(params)
    for step in range(steps):
      updates, opt_state = tx.update(grads, opt_state, params)
      options = {"key": jax.random.fold_in(key, step), **rounding} if rounding else {}
      params = mpjax.apply_updates(params, updates, None if rounding else opt_state, **options)
    return float(jnp.mean(params["w"].astype(jnp.float32)))

  report = mpjax.ranges(lambda p, g: mpjax.apply_updates(p, g))(params, grads)
  text = " ".join(str(report).split())
  assert "store them in float32, keep float32 masters (tx = mpjax.master_weights(tx))" in text
  (options,) = re.findall(r"mpjax.apply_updates\(\.\.\., (rounding=.*?), key=key\)", text)
  assert report.lost_updates == 1
  assert trained(params, tx, None) == 1
  remedies = {
    "stored in float32": (jax.tree.map(lambda p: p.astype("float32"), params), tx, None),
    "masters": (params, mpjax.master_weights(tx), None),
    "stochastic": (params, tx, eval(f"dict({options})")),
  }
  for name, remedy in remedies.items():
    assert trained(*remedy) == pytest.approx(1 - steps * 1e-3, abs=2**-9), name


def test_a_model_of_nnx():
  model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
  graph, state = nnx.split(model)
  report = mpjax.ranges(lambda u, m: m.bias.__setitem__(..., m.bias[...] + u))(jnp.ones(()), model)
  assert [each.path for each in report.of("updates")] == ["m/bias"]
  report = mpjax.ranges(lambda s, x: jnp.sum(nnx.merge(graph, s)(x)))(state, jnp.ones((8, 8)))
  assert {g.path for g in report.of("parameters")} == {"s/kernel", "s/bias"}
  assert report.of("gradients")


class Tokens(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(10, 8, rngs=rngs)
    self.head = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, tokens):
    return self.head(1e6 * self.embed(tokens))  # The result overflows float16.


class LinenTokens(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    return nn.Dense(8)(1e6 * nn.Embed(10, 8)(tokens))


def activations_of(report):
  rows = report.of("activations")
  return sum(row.total for row in rows), sum(row.lost["float16"]["overflow"] for row in rows)


def test_weights_that_a_function_closes_over_count_like_arguments():
  model, tokens = Tokens(nnx.Rngs(0)), jnp.arange(10)
  expected = activations_of(mpjax.ranges(lambda model, x: model(x))(model, tokens))
  assert expected[1] > 0
  assert activations_of(mpjax.ranges(lambda x: model(x))(tokens)) == expected
  linen = LinenTokens()
  variables = linen.init(jax.random.key(0), tokens)
  expected = activations_of(mpjax.ranges(linen.apply)(variables, tokens))
  assert expected[1] > 0
  assert activations_of(mpjax.ranges(linen.bind(variables))(tokens)) == expected


def test_a_scalar_in_a_dict_or_list_and_one_of_keywords_alone_is_no_loss():
  assert not mpjax.ranges(lambda *, w: jnp.sum(w))(w=jnp.ones(2)).of("gradients")
  for fn in (lambda w: {"loss": jnp.sum(w)}, lambda w: [jnp.sum(w)], lambda w: {"0": jnp.sum(w)}):
    assert not mpjax.ranges(fn)(jnp.ones(2)).of("gradients")
  assert mpjax.ranges(lambda w: (jnp.sum(w @ w), w))(jnp.ones((8, 8))).of("gradients")


@pytest.mark.parametrize(
  "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_counts_are_those_of_numpy(dtype):
  x = awkward(dtype)
  counts, wide = mpjax.reports.GroupRanges(kind="float32", path=""), x.astype(np.float64)
  for each in (x[:1000], x[1000:], x[:0]):
    add(counts, each if dtype == "float64" else jnp.asarray(each))
  check_equal(counts, x)
  special = np.sum(wide == 0), np.sum(np.isinf(wide)), np.sum(np.isnan(wide)), 0
  assert (counts.zero, counts.inf, counts.nan, counts.lost_updates) == special
  assert counts.largest == np.max(np.abs(wide[np.isfinite(wide)]))


def test_updates_that_are_lost_and_complex_numbers_which_no_policy_casts():
  counts = mpjax.reports.GroupRanges(kind="updates", path="")
  add(counts, np.asarray([3, 1.5, 0], np.float32), np.asarray([True, False, False]))
  assert (counts.exponents, counts.zero, counts.lost_updates) == ({1: 1, 0: 1}, 1, 1)
  report = mpjax.ranges(lambda x: jnp.fft.fft(x) * 2j)(jnp.ones(4, jnp.complex64))
  assert not report.groups


def scaled_step(tx):
  def step(params, opt_state, x):
    loss_fn = mpjax.autocast(lambda p: jnp.mean((x @ p["w"]) ** 2), "mixed_float16")
    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_step_under_pmap_vmap_and_shard_map_is_reported_as_without():
  tx = mpjax.loss_scaling(optax.sgd(1e-3))
  params, x = {"w": jnp.full((8, 2), 0.1)}, jnp.ones((4, 8))
  step, args = scaled_step(tx), (params, tx.init(params), x)
  plain = mpjax.ranges(step)(*args)
  mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
  specs = (jax.P(), jax.P(), jax.P("d"))
  sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
  twice = jax.tree.map(lambda x: jnp.stack([x, x]), args)
  for fn, inputs in ((jax.pmap(step), twice), (jax.vmap(step), twice), (sharded, args)):
    report = mpjax.ranges(fn)(*inputs)
    assert report.loss_scale_in_use == plain.loss_scale_in_use
    assert [(g.kind, g.path) for g in report.groups] == [(g.kind, g.path) for g in plain.groups]
    assert report.lost_updates == plain.lost_updates == 0


ACCUMULATIONS = {
  "of mpjax": lambda tx: mpjax.accumulate_gradients(tx, 2),
  "of optax": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("accumulate", ACCUMULATIONS.values(), ids=ACCUMULATIONS)
def test_the_running_sum_of_an_accumulation_is_no_update(accumulate):
  params, x = {"w": jnp.full((8, 2), 0.5, jnp.bfloat16)}, jnp.ones((4, 8))
  tx = mpjax.loss_scaling(accumulate(optax.sgd(1e-5)), mpjax.NoLossScale())
  step, opt_state = jax.jit(scaled_step(tx)), tx.init(params)
  first = mpjax.ranges(step)(params, opt_state, x)
  assert np.isnan(first.lost_updates)  # Updates of 0.
  _, opt_state, _ = step(params, opt_state, x)
  second = mpjax.ranges(step)(params, opt_state, x)
  assert [g.path for g in second.of("updates")] == ["params/w"]
  assert second.lost_updates == 1
  # Obey the advice: float32 masters take the updates.
  masters = mpjax.loss_scaling(
    mpjax.master_weights(accumulate(optax.sgd(1e-5))), mpjax.NoLossScale()
  )
  step, opt_state = jax.jit(scaled_step(masters)), masters.init(params)
  _, opt_state, _ = step(params, opt_state, x)
  cured = mpjax.ranges(step)(params, opt_state, x)
  assert [g.path.split("/")[-2:] for g in cured.of("updates")] == [["master", "w"]]
  assert cured.lost_updates == 0


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize(("size", "scale", "proposed"), [(1e3, 2.0**15, 16), (1.0, 2.0**24, 2**13)])
def test_the_scale_that_is_proposed_after_an_overflow_ends_the_skips(size, scale, proposed):
  params, x = {"w": jnp.full((8, 2), 1e-4)}, jnp.ones((1, 8))

  def step_at(scale):
    tx = mpjax.loss_scaling(optax.sgd(1e-9), mpjax.StaticLossScale(scale))

    def step(params, opt_state):
      loss_fn = mpjax.autocast(lambda p: jnp.mean(size * (x @ p["w"])), "mixed_float16")
      _, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params)
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    return step, tx.init(params)

  step, opt_state = step_at(scale)
  report = mpjax.ranges(step)(params, opt_state)
  assert mpjax.loss_scaling_metrics(step(params, opt_state)[1])["skipped"] == 1
  assert report.loss_scale == proposed
  assert report.lost_gradients(scale) > 0.5
  assert report.lost_gradients(report.loss_scale) == 0
  step, opt_state = step_at(report.loss_scale)
  assert mpjax.loss_scaling_metrics(step(params, opt_state)[1])["skipped"] == 0
  assert mpjax.ranges(step)(params, opt_state).loss_scale == proposed


def test_an_overflow_at_every_scale_is_not_that_of_the_scale():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(1024))

  def gradient(w, opt_state, x):
    def loss_fn(w):
      return jnp.inf * jnp.sum((x @ w.astype(x.dtype)).astype(jnp.float32))

    return jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(w)[1]

  w = jnp.ones((2, 2))
  report = mpjax.ranges(gradient)(w, tx.init(w), jnp.ones((1, 2), jnp.float16))
  assert report.rescaled is None
  assert report.loss_scale is None


@pytest.mark.slow
def test_the_scale_that_the_report_proposes_keeps_gradients():
  w, x = normal(2, 16, 16), normal(32, 16, seed=1).astype("float16")

  def loss(w, x):
    return 1e-6 * jnp.mean(((nn.relu(x @ w[0]) @ w[1]).astype(jnp.float32)) ** 2)

  report = mpjax.ranges(loss)(w.astype("float16"), x)

  def in_float16(scale):
    """Returns how many gradients are 0 that are not in float32, and how many are not finite."""
    gradient = jax.jit(jax.grad(lambda w, x: scale * loss(w, x)))
    exact, low = gradient(w, x.astype("float32")), gradient(w.astype("float16"), x)
    return int(jnp.sum((low == 0) & (exact != 0))), int(jnp.sum(~jnp.isfinite(low)))

  zeros, bad = in_float16(report.loss_scale)
  assert bad == 0
  assert 10 * zeros < in_float16(1.0)[0]


def test_rows_of_a_step_without_scopes_are_those_of_its_parameters():
  def step(params, x):
    def loss(params):
      y = x @ params["mlp"]["up"]["w"]
      return jnp.mean((y @ params["mlp"]["down"]["w"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

  params = {"mlp": {"up": {"w": jnp.ones((8, 8))}, "down": {"w": jnp.ones((8, 2))}}}
  report = mpjax.ranges(step)(params, jnp.ones((8, 8)))
  for kind in ("activations", "gradients"):
    assert {g.path for g in report.of(kind)} >= {"mlp/up", "mlp/down"}
  assert {g.path for g in report.of("updates")} == {"params/mlp/up/w", "params/mlp/down/w"}


def test_a_function_that_is_no_loss_is_traced_once():
  traces = []

  def step(x):
    traces.append(x.shape)
    return 2 * x

  mpjax.ranges(step)(jnp.ones(2))
  assert traces == [(2,)]
