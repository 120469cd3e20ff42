"""One verb for Linen, NNX and functions, and the settings that go by the name of a level."""

import contextlib
import dataclasses
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._compositions import LEVELS, _for_device
from mpjax._policy.rules import is_flax_norm
from tests.errors import refused
from tests.programs import stored

X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
W = jnp.linspace(0.0, 1.0, 16).reshape(8, 2)
VARIABLES = {"params": {"kernel": W, "bias": jnp.zeros(2)}}
EXACT = np.asarray(X.astype("bfloat16") @ W.astype("bfloat16"))


def linear():
  model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
  nnx.update(model, VARIABLES["params"])
  return model


def test_a_model_and_a_function_run_under_the_policy():
  module = mpjax.with_policy(nn.Dense(2), "c=bf16")
  assert isinstance(module, mpjax.linen.PolicyModule)
  assert module == mpjax.linen.with_policy(nn.Dense(2), "c=bf16")
  model = linear()
  view = mpjax.with_policy(model, "c=bf16")
  assert view.kernel is model.kernel
  for out in (module.apply(VARIABLES, X), view(X)):
    assert out.dtype == "bfloat16"
    np.testing.assert_array_equal(out, EXACT)
  fun = mpjax.with_policy(lambda w, x: x @ w, "mixed_bfloat16", data_argnums=1)
  assert "bf16" in str(jax.make_jaxpr(fun)(W, X))


def test_rules_and_options_are_passed_on():
  rules = [mpjax.Rule("float32", path="**")]
  assert mpjax.with_policy(nn.Dense(2), "c=bf16", rules).apply(VARIABLES, X).dtype == "float32"
  assert mpjax.with_policy(linear(), "c=bf16", rules)(X).dtype == "float32"
  absent = [mpjax.Rule("bf16", path="absent")]
  with pytest.warns(UserWarning, match="absent"):
    mpjax.with_policy(linear(), None, absent, unmatched="warn")
  fun = jax.named_scope("head")(lambda w, x: jnp.exp(x @ w))
  half = mpjax.with_policy(fun, None, [mpjax.Rule("c=bf16", path="head")])
  assert "bf16" in str(jax.make_jaxpr(half)(W, X))
  assert mpjax.with_policy(fun, None) is fun
  low_exp = mpjax.with_policy(fun, "c=bf16", ops=mpjax.OpLists().replace(half=["exp"]))
  assert "bf16[2,2] = exp" in str(jax.make_jaxpr(low_exp)(W, X))


class Pretrained:
  """Holds a Linen module and its parameters, as the Flax models of Hugging Face do."""

  def __init__(self):
    self.module, self.params = nn.Dense(2), VARIABLES["params"]

  def __call__(self, x):
    return self.module.apply({"params": self.params}, x)


REFUSED = {
  "around a module": (Pretrained(), {}, "a model", "around a Linen module", "mpjax.policy_scope"),
  "a class": (nn.Dense, {}, "a model", "the class Dense", "mpjax.with_policy(Dense(...)"),
  "a number": (3, {}, "a model", "3", "mpjax.with_policy(fn"),
  "ops of a model": (nn.Dense(2), {"ops": mpjax.OpLists()}, "no ops=", "them", "for functions"),
  "arguments of a model": (linear(), {"data_argnums": 0}, "data_argnums=", "them", "for functions"),
  "unmatched of a function": (jnp.sin, {"unmatched": "warn"}, "no unmatched=", "'warn'", "rule"),
  "an unknown option": (nn.Dense(2), {"rule": ()}, "arguments", "rule", "rules="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
  model, options, expected, got, fix = REFUSED[case]
  with refused(TypeError, "mpjax.with_policy(model)", expected, got, fix):
    mpjax.with_policy(model, "c=bf16", **options)


def test_a_scope_is_that_of_linen():
  rules = [mpjax.Rule("float32", path="out")]
  with mpjax.policy_scope("c=bf16", rules, unmatched="ignore"):
    assert nn.Dense(2).apply(VARIABLES, X).dtype == "bfloat16"
  # A scope that is used warns of nothing: warnings are errors.
  assert mpjax.policy_scope("c=bf16")(nn.Dense(2).apply)(VARIABLES, X).dtype == "bfloat16"
  with pytest.warns(UserWarning, match=r"never entered.*with mpjax.policy_scope"):
    mpjax.policy_scope("mixed_bfloat16")


def loss_fn(model, x):
  return jnp.sum(model(x) ** 2)


def test_an_nnx_optimizer_and_a_state_give_the_same_scaled_gradients():
  model = linear()
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  mpjax.value_and_grad(loss_fn, opt_state=optimizer)(model, X)  # As the signature calls it.
  loss, grads = mpjax.value_and_grad(loss_fn, optimizer)(model, X)
  graphdef, params = nnx.split(model, nnx.Param)
  plain, expected = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X))(params)
  of_state = mpjax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X), TX.init(params))
  for found, tree in ((loss, grads), of_state(params)):
    assert float(found) == float(plain)
    jax.tree.map(lambda g, e: np.testing.assert_array_equal(g, 8 * e), tree, expected)
  # Options are passed on.
  both = mpjax.value_and_grad(lambda x, m: (loss_fn(m, x), "aux"), optimizer, 1, has_aux=True)
  (loss, aux), grads = both(X, model)
  assert aux == "aux"
  assert loss.shape == ()
  assert set(grads) == {"kernel", "bias"}


F32, DYNAMIC, NONE = "float32", mpjax.DynamicLossScale(), mpjax.NoLossScale()


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("level", "dtype", "stored", "compute", "output", "loss_scale", "lists", "masters"),
  [
    ("O0", "bfloat16", F32, F32, None, NONE, False, False),
    ("O0", "float16", F32, F32, None, NONE, False, False),
    ("O1", "bfloat16", F32, "bfloat16", F32, NONE, True, False),
    ("O1", "float16", F32, "float16", F32, DYNAMIC, True, False),
    ("O2", "bfloat16", "bfloat16", "bfloat16", F32, NONE, False, True),
    ("O2", "float16", "float16", "float16", F32, DYNAMIC, False, True),
    ("O3", "bfloat16", "bfloat16", "bfloat16", F32, NONE, False, False),
    ("O3", "float16", "float16", "float16", F32, mpjax.StaticLossScale(1), False, False),
  ],
)
def test_the_table(level, dtype, stored, compute, output, loss_scale, lists, masters):
  found = mpjax.opt_level(level, dtype)
  assert found.policy == mpjax.Policy(
    param_dtype=stored, compute_dtype=compute, output_dtype=output
  )
  assert found.loss_scale == loss_scale
  assert found.ops == (mpjax.OpLists() if lists else None)
  assert found.master_weights is masters
  norms = (mpjax.Rule(mpjax.Policy(compute_dtype=compute), where=is_flax_norm),)
  assert found.rules == (norms if level == "O2" else ())
  if dtype == "bfloat16":
    assert mpjax.opt_level(level) == found


def test_the_norms_that_o2_stores_in_float32():
  linen = [nn.BatchNorm(), nn.LayerNorm(), nn.RMSNorm(), nn.GroupNorm(), nn.InstanceNorm()]
  state = nnx.Rngs(0)
  of_nnx = [nnx.BatchNorm(2, rngs=state), nnx.LayerNorm(2, rngs=state), nnx.RMSNorm(2, rngs=state)]
  assert all(map(is_flax_norm, [*linen, *of_nnx, nn.remat(nn.LayerNorm)()]))

  class OwnBatchNorm(nn.Module):
    pass

  others = [nn.Dense(1), nn.SpectralNorm(nn.Dense(1)), nn.WeightNorm(nn.Dense(1)), OwnBatchNorm()]
  assert not any(map(is_flax_norm, [*others, nnx.Linear(1, 1, rngs=state)]))


# --- the device -----------------------------------------------------------------------------------


def test_auto_warns_once_of_a_half_type_without_units():
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("default")  # What Python does unless told otherwise.
    level = mpjax.opt_level("auto", "float16")
    assert mpjax.opt_level("auto", "float16") == level
  assert jax.devices()[0].platform == "cpu"
  assert mpjax.opt_level("auto") == mpjax.opt_level("O0")
  assert [w.category for w in found] == [UserWarning]
  assert "float16 saves memory but no time on this device (cpu)" in str(found[0].message)
  assert level == mpjax.opt_level("O1", "float16")


# Devices, and the dtypes that they have units for, the better one first.
DEVICES = {
  # A CPU; P100, GTX 1080; MI250, and one that says nothing.
  (("cpu", None), *(("gpu", n) for n in ("6.0", "6.1", "gfx90a", None))): (),
  (("gpu", "7.0"), ("gpu", "7.5")): ("float16",),  # V100, T4
  (("tpu", None),): ("bfloat16",),
  # A100, RTX 3090, L4, H100, B200, RTX 5090.
  tuple(("gpu", n) for n in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")): ("bfloat16", "float16"),
}


def test_what_auto_makes_of_a_device():
  for devices, native in DEVICES.items():
    for device in devices:
      assert _for_device(*device, None) == (("O1", native[0]) if native else ("O0", None)), device
      # A dtype is obeyed, and warned of where the device has no units for it.
      for half in ("bfloat16", "float16"):
        shown = re.escape(f"({' '.join(filter(None, device))})")
        text = f"^mpjax.opt_level: {half} .* {shown}; {native[0] if native else 'float32'} is "
        warns = pytest.warns(UserWarning, match=text)
        with contextlib.nullcontext() if half in native else warns:  # A warning is an error.
          assert _for_device(*device, half) == ("O1", half)


def test_only_auto_looks_at_the_device(monkeypatch):
  def devices():
    raise RuntimeError("looked")

  monkeypatch.setattr(jax, "devices", devices)
  for level in ("O0", "O1", "O2", "O3"):
    mpjax.opt_level(level, "float16")
  with pytest.raises(RuntimeError, match="looked"):
    mpjax.opt_level("auto")


# --- as a value -----------------------------------------------------------------------------------


def test_frozen_equal_and_hashable():
  level = mpjax.opt_level("O2", "float16")
  again = mpjax.opt_level("O2", "float16")
  assert level == again
  assert hash(level) == hash(again)
  assert len({mpjax.opt_level(name, half) for name in LEVELS[:4] for half in ("f16", "bf16")}) == 7
  with pytest.raises(dataclasses.FrozenInstanceError):
    level.master_weights = False
  assert not dataclasses.replace(level, master_weights=False).master_weights


def test_print():
  norms = "Rule('params=float32,compute=bfloat16', where=is_flax_norm)"
  assert str(mpjax.opt_level("O2")).splitlines() == [
    "policy          params=bfloat16,compute=bfloat16,output=float32",
    f"rules           {norms}",
    "ops             None",
    "loss_scale      NoLossScale()",
    "master_weights  True",
  ]
  ours = dataclasses.replace(mpjax.opt_level("O1"), rules=(mpjax.Rule("float32", path="head"),))
  assert f"rules           {ours.rules[0]!r}" in str(ours)
  assert "ops             OpLists()" in str(ours)


# --- errors ---------------------------------------------------------------------------------------


HALF = "'bfloat16' or 'float16'"
NO_DTYPES = [
  ("float32", HALF, "'float32'", "Did you mean", ValueError),
  ("float8_e4m3fn", HALF, "'float8_e4m3fn'", "Did you mean", ValueError),
  ("float61", "a floating dtype", "'float61'", "'float16'", ValueError),
  ("int8", "a floating dtype", "int8", "never cast", TypeError),
]


def test_unknown_levels_and_dtypes():
  for level in ("01", "o1", "O4", "", 1, None):
    expected, fix = "'O0' or 'O1' or 'O2' or 'O3' or 'auto'", "Did you mean"
    with refused(ValueError, "mpjax.opt_level(level)", expected, repr(level), fix):
      mpjax.opt_level(level)
  for dtype, expected, got, fix, builtin in NO_DTYPES:
    for level in LEVELS:
      with refused(builtin, "mpjax.opt_level(dtype)", expected, got, fix):
        mpjax.opt_level(level, dtype)


INPUTS = jax.random.normal(jax.random.key(1), (16, 4))
TARGETS = jnp.sum(INPUTS, axis=1, keepdims=True)


NORM = nn.BatchNorm(use_running_average=False)
NORMED = nn.Sequential([nn.Dense(8), NORM, nn.relu, nn.Dense(1)])


@pytest.mark.filterwarnings("ignore:.*stored in low precision")  # That is what O3 is.
@pytest.mark.parametrize(
  ("name", "dtype"), [("O0", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16")]
)
def test_a_level_trains(name, dtype):
  level = mpjax.opt_level(name, dtype)
  model = mpjax.linen.with_policy(NORMED, level.policy, level.rules, unmatched="ignore")
  tx = mpjax.master_weights(optax.sgd(0.05)) if level.master_weights else optax.sgd(0.05)
  tx = mpjax.loss_scaling(tx, level.loss_scale)
  variables = model.init(jax.random.key(0), INPUTS)

  def loss_fn(params, model_state, batch, rng):
    variables = {"params": params, "batch_stats": model_state}
    out, new = model.apply(variables, INPUTS, mutable=["batch_stats"])
    assert out.dtype == jnp.float32
    return jnp.mean((out - TARGETS) ** 2), (new["batch_stats"], {})

  step = mpjax.make_train_step(loss_fn, tx)
  stats = variables["batch_stats"]
  state, losses = mpjax.TrainState.create(variables["params"], tx, model_state=stats), []
  for _ in range(20):
    state, metrics = step(state, ())
    losses.append(float(metrics["loss"]))
  params, opt_state = state.params, state.opt_state
  assert losses[-1] < 0.5 * losses[0]
  half = jnp.dtype("float32" if name == "O0" else dtype)
  of_norms = half if name == "O3" else jnp.dtype("float32")
  assert {p.dtype for p in jax.tree.leaves(params.pop("layers_1"))} == {of_norms}
  assert {p.dtype for p in jax.tree.leaves(params)} == {half}
  if level.master_weights:
    master = mpjax.master_params(opt_state)
    assert jax.tree.leaves(master.pop("layers_1")) == []  # In float32: its own master.
    assert {m.dtype for m in jax.tree.leaves(master)} == {jnp.dtype("float32")}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, stored(m, half)), params, master)


def test_a_level_scales_once():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.opt_level("O1", "float16").loss_scale)
  assert mpjax.loss_scaling_metrics(tx.init({"w": jnp.ones(2)}))["loss_scale"] == 2**15
  with pytest.raises(mpjax.MpjaxError, match="loss_scaling"):
    mpjax.loss_scaling(tx, mpjax.opt_level("O2", "float16").loss_scale).init({"w": jnp.ones(2)})
