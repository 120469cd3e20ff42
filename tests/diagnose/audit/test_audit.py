"""`mpjax.audit`: FLOPs against figures derived by hand, what the report shows, and how."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.models import parts
from tests.models.parts import module
from tests.models.values import filled, shapes
from tests.programs import run, s

BF16 = jnp.bfloat16
X = np.ones((4, 8), np.float32)


def flops(fn, *args):
  """FLOPs by pass."""
  found: dict[str, int] = {}
  for (direction, _), n in mpjax.audit(fn)(*args).flops.items():
    found[direction] = found.get(direction, 0) + n
  return found


def summed(fn):
  return lambda *args: jnp.sum(fn(*args))


def stacked(w, x):
  return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def recurrent(w, xs):
  return jax.lax.scan(lambda h, x: (jnp.tanh(x @ w[0] + h @ w[1]), None), xs[0], xs)[0]


# By hand: two for each multiplication and addition. A matmul of (m, k) and (k, n) is 2 m n k, and
# so is each of its two gradients; that of an input which is no parameter is not computed.
B, T, D, H = 4, 6, 8, 16
FLOPS = {
  "mlp": (
    *(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], ((s(D, H), s(H, D)), s(B, D))),
    *(2 * B * D * H * 2, 2 * B * D * H * 3),
  ),
  "over time": (recurrent, (s(2, D, D), s(T, B, D)), T * 2 * 2 * B * D * D, T * 3 * 2 * B * D * D),
  "scan over layers": (stacked, (s(3, D, D), s(B, D)), 3 * 2 * B * D * D, 3 * 2 * 2 * B * D * D),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_derived_by_hand(name):
  fn, args, forward, backward = FLOPS[name]
  assert flops(fn, *args) == {"forward": forward}
  both = jax.value_and_grad(summed(fn))
  assert flops(both, *args) == {"forward": forward, "backward": backward}


def test_what_no_result_depends_on_is_not_counted():
  """The gradient alone: XLA drops the last matmul of the forward pass."""
  fn, args, forward, backward = FLOPS["mlp"]
  gradient = jax.grad(summed(fn))
  assert flops(gradient, *args) == {"forward": forward // 2, "backward": backward}


def test_recomputed_work_is_shown_apart():
  fn = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
  once = 2 * B * D * D
  found = flops(jax.value_and_grad(summed(fn)), s(D, D), s(B, D))
  # The derivative of the last tanh needs its result too, and so both matmuls run again.
  assert found == {"forward": 2 * once, "recomputed": 2 * once, "backward": 3 * once}


def test_branches_and_while_loops_are_said_to_be_uncertain():
  def fn(x, n):
    return jax.lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] @ c[0], c[1] - 1), (x, n))[0]

  audit = mpjax.audit(fn)(s(8, 8), s(dtype=jnp.int32))
  in_float32, uncertain = audit.notes
  assert "float32 of default precision" in in_float32
  assert "counts as one iteration" in uncertain
  assert sum(audit.flops.values()) == 2 * 8**3
  assert "while loop counts as one iteration" in str(audit)


def test_float32_matmuls_of_default_precision_are_told_with_their_share():
  def fn(w, x):
    return jnp.dot(x, w, precision="highest") @ w

  (note,) = mpjax.audit(fn)(s(8, 8), s(8, 8)).notes
  assert "50.0 % of the matmuls' FLOPs are in float32 of default precision: TF32" in note
  assert "float32_highest" in note
  exact = mpjax.autocast(fn, "float32_highest")
  assert mpjax.audit(exact)(s(8, 8), s(8, 8)).notes == ()


@pytest.mark.parametrize(("size", "named"), [(8, True), (256, False)])
def test_a_costly_matmul_that_a_policy_keeps_in_float32_is_named(size, named):
  def fn(w, x):
    with jax.named_scope("pairs"):
      kept = x @ x.T
    return (kept @ w).sum()

  # Of the FLOPs, x @ x.T has 8 / (8 + size).
  cast = mpjax.autocast(fn, data_argnums=1)
  notes = mpjax.audit(cast)(s(8, size), s(8, 8)).notes
  share = 8 / (8 + size)
  expected = f"pairs: {100 * share:.1f} % of the matmuls' FLOPs are in float32 of the highest"
  assert any(note.startswith(expected) for note in notes) == named == (share > 0.05)
  asked = mpjax.Policy(compute_dtype="bfloat16", precision="default")
  notes = mpjax.audit(mpjax.autocast(fn, asked, data_argnums=1))(s(8, size), s(8, 8)).notes
  assert not any("highest precision, because" in note for note in notes)


def with_features(w, x, columns):
  bank = jnp.linspace(0, 1, columns * 32).reshape(columns, 32)
  return x[:, :columns] @ bank @ w


def with_low_features(w, x):
  bank = jnp.linspace(0, 1, 64 * 32).reshape(64, 32)
  return (x.astype("float16") @ bank.astype("float16")).astype("float32") @ w


def test_a_costly_matmul_of_inputs_is_named_with_a_cast_that_makes_it_low():
  args = s(32, 4), s(4, 64)
  features = functools.partial(with_features, columns=64)
  (note,) = mpjax.audit(mpjax.autocast(features, "mixed_float16", data_argnums=1))(*args).notes
  assert note == (
    "A matmul: 94.1 % of the matmuls' FLOPs are in float32 of the highest precision, because its "
    "operands are inputs and constants. If they need no float32, cast them: x.astype(jnp.float16)."
  )
  cured = mpjax.audit(mpjax.autocast(with_low_features, "mixed_float16", data_argnums=1))(*args)
  assert (cured.half_share, cured.notes) == (1, ())


def test_no_cast_is_advised_for_a_matmul_that_is_float32_for_another_reason():
  few = functools.partial(with_features, columns=3)
  asked = mpjax.full_precision(functools.partial(with_features, columns=64))
  for fn in few, lambda w, x: asked(w, x) + x[:, :32] @ w:
    (note,) = mpjax.audit(mpjax.autocast(fn, data_argnums=1))(s(32, 4), s(4, 64)).notes
    assert "astype" not in note


class Net(nn.Module):
  dtype: str | None = None

  @nn.compact
  def __call__(self, x):
    for i in range(3):
      x = nn.relu(nn.Dense(8, name=f"layer_{i}")(x))
    return nn.Dense(5, name="head", dtype=self.dtype)(nn.LayerNorm()(x))


@functools.cache
def audited(model, policy=None, rules=()):
  x = s(16, 8)
  variables = jax.eval_shape(model.init, jax.random.key(0), x)
  if policy is not None:
    model = mpjax.linen.with_policy(model, policy, rules)
  return mpjax.audit(jax.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))(
    variables, x
  )


def test_the_headline_of_a_policied_model_and_of_one_outside_of_its_policy():
  audit = audited(Net(), "mixed_bfloat16")
  assert audit.half_share == 1
  assert audit.format_share == 0
  assert audit.leaks == ()
  assert set(audit.flops) == {("forward", "bfloat16"), ("backward", "bfloat16")}
  assert repr(audit) == "<AuditReport: 100.0 % of the matmuls' FLOPs in low precision, no leaks>"
  assert "100.0 % of the matmuls' FLOPs in low precision, no leaks" in str(audit)
  data = json.loads(audit.to_json())
  assert data["flops"] == {" ".join(key): n for key, n in audit.flops.items()}
  assert (data["leaks"], data["half_share"]) == ([], 1)
  rows = [row for row in data["modules"] if row["path"].startswith("Net/layer_")]
  assert sum(row["flops"] for row in rows) == 3 * 2 * 16 * 8 * 8 * 3 - 2 * 16 * 8 * 8
  assert {row["dtype"] for row in rows} == {"bfloat16"}
  outside = audited(Net())
  assert outside.half_share == 0
  pairs = ([x.activations for x in y.modules if x.path == "Net/layer_1"] for y in (audit, outside))
  (under,), (plain,) = pairs
  assert ("bfloat16" in under, plain) == (True, ("float32",))


@pytest.mark.parametrize(
  ("policy", "accumulation", "line"),
  [
    ("c=bf16", {"backend default": 3072}, "Accumulation: backend default"),
    ("c=bf16,precision=BF16_BF16_F32", {"float32": 3072}, "Accumulation: float32"),
    ("c=f16,precision=F16_F16_F16", {"float16": 3072}, "Accumulation: float16"),
    (
      "c=bf16,o=f32",
      {"float32": 1024, "backend default": 2048},
      "Accumulation: backend default 66.7 %, float32 33.3 % of FLOPs in low precision",
    ),
  ],
)
def test_the_audit_shows_in_which_dtype_matmuls_state_their_sums(policy, accumulation, line):
  def loss(w, x):
    return mpjax.autocast(jnp.dot, policy)(x, w).sum()

  audit = mpjax.audit(jax.value_and_grad(loss, (0, 1)))(s(8, 8), s(8, 8))
  assert audit.accumulation == accumulation
  assert line in str(audit).splitlines()


def test_an_audit_in_float32_shows_no_accumulation():
  audit = mpjax.audit(jnp.dot)(s(8, 8), s(8, 8))
  assert audit.accumulation == {}
  assert "Accumulation" not in str(audit)


def test_a_jitted_step_that_ran_before_shows_its_policies():
  model = mpjax.linen.with_policy(Net(), "mixed_bfloat16", [mpjax.Rule("float32", path="head")])
  x = jnp.ones((16, 8))
  variables = filled(shapes(model, x))
  step = jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
  before = step(variables, x)
  first, second = mpjax.audit(step)(variables, x), mpjax.audit(step)(variables, x)
  assert first.on_purpose == second.on_purpose
  assert first.on_purpose[0].path == "Net/head"
  # The audit leaves nothing behind: the function runs as before, without its marks.
  after = step(variables, x)
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert "mpjax." not in step.lower(variables, x).as_text(debug_info=True)


def test_keyword_arguments_of_the_function_are_its_own():
  audit = mpjax.audit(lambda x, *, compiled: x @ compiled)(s(2, 2), compiled=s(2, 2))
  assert audit.flops == {("forward", "float32"): 16}


def test_the_dtype_of_a_module_that_a_policy_overrules_is_shown():
  rows = {row.path: row for row in audited(Net(dtype="float32"), "mixed_bfloat16").modules}
  assert rows["Net/head"].reason == "the policy over dtype=float32"
  assert rows["Net/head"].dtype == "bfloat16"


def test_a_linen_model_is_no_function_and_arguments_come_in_a_second_call():
  with refused(TypeError, "mpjax.audit(fn)", "a function", "flax.linen.Module", "model.apply"):
    mpjax.audit(nn.Dense(2))
  fix = "Write mpjax.audit(step)(state, batch)"
  with refused(TypeError, "mpjax.audit(fn)", "arguments fn", "too many", fix):
    mpjax.audit(jnp.matmul, X, X)


WIDE = jax.ShapeDtypeStruct((16, 8), "float32")


@pytest.mark.standard_promotion
def test_float16_gradients_without_a_loss_scale_are_said():
  """The advice, obeyed, ends it; bfloat16 has the range of float32 and needs none."""
  tx = mpjax.loss_scaling(optax.sgd(1.0))
  w, x = np.ones((8, 8), np.float32), np.ones((4, 8), np.float32)
  opt_state = tx.init(w)

  def loss_under(policy):
    outputs = mpjax.with_policy(lambda w, x: x @ w, policy)
    return lambda w, x: 2e-8 * jnp.sum(outputs(w, x).astype("float32"))

  def step(w, opt_state, x):
    _, grads = jax.value_and_grad(mpjax.scaled(loss_under("fp16"), opt_state))(w, x)
    return tx.update(grads, opt_state, w)[0]

  gradient, said = jax.grad(loss_under("fp16")), "Float16 gradients without a loss scale"
  text = str(mpjax.audit(gradient)(w, x))
  assert said in text
  assert said not in str(mpjax.audit(jax.jit(step))(w, opt_state, x))
  assert said not in str(mpjax.audit(loss_under("fp16"))(w, x))
  assert said not in str(mpjax.audit(jax.grad(loss_under("bf16")))(w, x))
  assert "those below 3e-8 become 0" in " ".join(text.split())
  assert not run(gradient, w, x).any()
  np.testing.assert_allclose(run(step, w, opt_state, x), -8e-8, rtol=0.01)


TWO = module(
  lambda m, x: m.second(m.first(x)),
  first=parts.dense(8, 8, bias=True),
  second=parts.dense(8, 8, bias=True),
)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_an_nnx_model_that_is_called_directly_shows_the_same_as_one_in_an_argument(policy):
  model = TWO.nnx(None, nnx.Rngs(0))
  model = model if policy is None else mpjax.with_policy(model, policy)
  called = mpjax.audit(model)(WIDE)
  assert [(row.path, row.params) for row in called.modules] == [
    ("first", ("float32",)),
    ("second", ("float32",)),
  ]
  assert called.modules == mpjax.audit(lambda model, x: model(x))(model, WIDE).modules
  assert called.modules == mpjax.audit(model.__call__)(WIDE).modules


class Counting(nnx.Module):
  def __init__(self, rngs):
    self.head, self.calls = nnx.Linear(8, 8, rngs=rngs), nnx.Variable(jnp.zeros(()))

  def __call__(self, x):
    return self.logits(x)

  def logits(self, x):
    self.calls[...] += 1
    return self.head(x)


def test_an_audit_of_an_nnx_model_or_its_method_leaves_its_state_as_it_is():
  model = Counting(nnx.Rngs(0))
  for called in (model, model.logits):
    (row,) = mpjax.audit(called)(WIDE).modules
    assert (row.path, row.params) == ("head", ("float32",))
  assert model.calls[...] == 0
