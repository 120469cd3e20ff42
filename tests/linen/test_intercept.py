"""What happens at a call: arguments, fields and results; lifted transforms; errors."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.linen.probes import HALF, KEY, Does, X, all_half, calling, calls, dtypes, operands, text
from tests.programs import bits, products, run

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16, F16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


def program_of(model, policy, rules=(), *args, variables=None):
  # Returns the jaxpr of a model's call, and the shape of its output.
  args = args or (X,)
  variables = jax.eval_shape(model.init, KEY, *args) if variables is None else variables
  apply = with_policy(model, policy, rules).apply
  return jax.make_jaxpr(apply, return_shape=True)(variables, *args)


def found_in(model, rules=()):
  """Returns the dtype of both operands of each product of a model under "mixed_bfloat16"."""
  found = [p.dtypes for p in products(program_of(model, "mixed_bfloat16", rules)[0])]
  assert all(left == right for left, right in found)
  return [jnp.dtype(left) for left, _ in found]


# Arguments


@pytest.mark.parametrize("lift", [nn.jit, nn.remat], ids=["jit", "remat"])
def test_static_arguments_stay_static(lift):
  def body(module, x, deterministic, sizes, name):
    assert (deterministic, sizes, name) == (True, (1, 2), "a")
    return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=deterministic)

  model = with_policy(lift(calling(body), static_argnums=(2, 3, 4))(), "mixed_bfloat16")
  variables = {"params": {"Dense_0": {"kernel": jnp.ones((8, 3)), "bias": jnp.ones(3)}}}
  all_half(lambda v: model.apply(v, X, True, (1, 2), "a"), variables, count=1)


# Outputs


def test_outputs_without_floating_arrays_are_the_same_objects():
  for value in (None, 3, "name", True, jnp.arange(3), jnp.ones(2, jnp.complex64), jax.nn.relu):
    assert with_policy(Does(lambda module, value=value: value), "bfloat16").apply({}) is value
  assert with_policy(Does(lambda module: (1, None)), "bfloat16").apply({}) == (1, None)
  returns = Does(lambda module: module.param("w", nn.initializers.ones, (2,)))
  assert with_policy(returns, "bfloat16").apply(returns.init(KEY)).dtype == BF16


class Yields(nn.Module):
  """A generator: its body runs after the call, step by step."""

  def setup(self):
    self.layer, self.w = nn.Dense(8), self.param("w", nn.initializers.ones, (8, 8))

  def __call__(self, x):
    while True:
      x = yield self.layer(x) @ self.w


def test_each_step_of_a_generator_runs_under_the_policy_of_its_module():
  def body(module, x):
    steps = Yields(name="steps")(x)
    x = next(steps)
    return nn.Dense(3)(steps.send(x))

  exempt = [Rule(None, path="steps")]
  for rules, low in ([], BF16), ([Rule("c=f16", path="steps")], F16), (exempt, F32):
    assert found_in(Does(body), rules) == [low] * 4 + [BF16], rules


# Fields


class Layer(nn.Module):
  """A layer as many models write it: with a `dtype` that it passes to its children."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    calls.append((str(self.name), str(jnp.dtype(self.dtype or "float32"))))
    return nn.Dense(8, dtype=self.dtype)(x)


class HardCoded(nn.Module):
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    x = jnp.asarray(x, self.dtype)
    for name in ("one", "two"):
      x = Layer(jnp.float32, name=name)(x)
    return nn.Dense(8, dtype=jnp.float32, name="last")(x)


def test_a_policy_beats_a_hard_coded_dtype_but_in_an_exempt_module():
  assert found_in(HardCoded()) == [BF16] * 3
  assert found_in(HardCoded(), [Rule(None, path="two")]) == [BF16, F32, BF16]
  for own in (None, jnp.float32):
    # The dtype of a module is passed to a child, which a rule leaves as it is.
    model = Does(lambda m, x, d=own: Layer(d, name="child")(Layer(d, name="other")(x)))
    calls.clear()
    assert found_in(model, [Rule(None, path="child")]) == [BF16, F32]
    assert set(calls) == {("other", "float32"), ("child", "float32")}
  # A root that is exempt is unchanged.
  variables = jax.eval_shape(HardCoded().init, KEY, X)
  wanted = text(HardCoded().apply, variables, X)
  exempt = with_policy(HardCoded(), "mixed_bfloat16", [Rule(None, path="**")])
  for model in (exempt, with_policy(HardCoded(), None)):
    assert text(model.apply, variables, X) == wanted


def test_setup_sees_a_float32_dtype_field():
  class Sets(nn.Module):
    dtype: Any

    def setup(self):
      calls.append(("setup", str(jnp.dtype(self.dtype))))
      self.dense = nn.Dense(8, dtype=self.dtype)
      self.table = jnp.ones((8, 8), self.dtype)

    def __call__(self, x):
      calls.append(("table", str(self.table.dtype)))
      return self.dense(x) @ self.table

  for own in (jnp.float32, jnp.bfloat16):
    variables = jax.eval_shape(Sets(own).init, KEY, X)
    calls.clear()
    model = with_policy(Sets(own), "mixed_float16")
    assert operands(model.apply, variables, X) == [("float16", "float16")] * 2
    assert calls == [("setup", "float32"), ("table", "float32")]


# Mixed and integer inputs


@pytest.mark.slow
@pytest.mark.parametrize("half", HALF)
def test_inputs_and_parameters_of_any_dtype_give_what_dtype_by_hand_gives(half):
  floats = ("float32", "bfloat16", "float16")
  pairs = [(w, x) for w in floats for x in (*floats, "int32", "int8", "bool")]
  params, rows = nn.Dense(2).init(KEY, X), jnp.asarray([[1, 0, 1, 0] * 2, [0, 1, 1, 0] * 2])
  stored = {to: jax.tree.map(lambda w, to=to: w.astype(to), params) for to in floats}
  given = [(stored[w], rows.astype(x)) for w, x in pairs]
  ours, by_hand = with_policy(nn.Dense(2), f"c={half}"), nn.Dense(2, dtype=half)
  found, wanted = run(lambda given: [[m.apply(*x) for x in given] for m in (ours, by_hand)], given)
  assert bits(found) == bits(wanted)
  # Without a policy the model promotes: what it computes by itself.
  plain = [jax.eval_shape(nn.Dense(2).apply, *each).dtype for each in given]
  assert plain == [jnp.promote_types(*pair) for pair in pairs]


# Lifted transforms


BROADCAST = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def accumulate(module, carry, x):
  # The body of a scan over layers or over time.
  calls.append(("carry", str(carry.dtype)))
  y = nn.Dense(3)(x)
  return carry + y.astype(carry.dtype), y


Cell = calling(accumulate)

SCANS = {
  # The body is a function: it reaches the interceptor as a method that no class has.
  "function": Does(
    lambda module, carry, xs: nn.scan(lambda cell, c, x: cell(c, x), **BROADCAST)(
      Cell(name="cell"), carry, xs
    )
  ),
  "method": calling(accumulate, functools.partial(nn.scan, **BROADCAST))(),
  # A module that is scanned as an attribute, with its parameters stacked.
  "over": Does(
    lambda module, carry, xs: nn.scan(
      Cell, variable_axes={"params": 0}, split_rngs={"params": True}
    )(name="cell")(carry, xs)
  ),
}


@pytest.mark.parametrize("carry", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCANS)
def test_a_carry_keeps_its_dtype(name, carry):
  # The type of a carry is the caller's: float32 for a sum that must be exact.
  root = Does(
    lambda module, xs: SCANS[name].clone(parent=module, name="scan")(jnp.zeros((2, 3), carry), xs)
  )
  xs = jnp.stack([X] * 4)
  model = with_policy(root, "c=bf16")
  variables = jax.eval_shape(model.init, KEY, xs)
  assert set(jax.tree.leaves(dtypes(variables))) == {"float32"}
  calls.clear()

  def loss(variables):
    end, ys = model.apply(variables, xs)
    return ys.sum().astype("float32"), (end, ys)

  gradient = jax.value_and_grad(loss, has_aux=True)
  program, ((_, (end, ys)), grads) = jax.make_jaxpr(gradient, return_shape=True)(variables)
  assert set(calls) == {("carry", carry)}
  assert (ys.dtype, end.dtype) == (jnp.bfloat16, jnp.dtype(carry))
  assert [p.dtypes for p in products(program)] == [("bfloat16", "bfloat16")] * 2
  assert dtypes(grads) == dtypes(variables)


def test_a_while_loop_that_starts_in_low_precision_goes_on_in_it():
  # Its layer would return float32 while it is traced: the module is called in half instead.
  def body(module, x):
    dense = nn.Dense(8, name="dense")
    if module.is_initializing():
      return dense(x)
    start = (jnp.zeros((), jnp.int32), x.astype(BF16))
    turn = lambda dense, carry: (carry[0] + 1, dense(carry[1]))  # noqa: E731
    _, out = nn.while_loop(lambda _, carry: carry[0] < 3, turn, dense, start)
    calls.append(("out", str(out.dtype)))
    return out

  variables = jax.eval_shape(Does(body).init, KEY, X)
  calls.clear()
  all_half(with_policy(Does(body), "mixed_bfloat16").apply, variables, X, count=1)
  assert set(calls) == {("out", "bfloat16")}


def test_a_function_under_remat_is_no_module():
  def body(module, x):
    x, n = nn.remat(lambda module, x: (nn.Dense(3, name="dense")(x), jnp.arange(2)))(module, x)
    assert n.dtype == jnp.int32
    calls.append(("outside", str(x.dtype)))
    return x

  variables = jax.eval_shape(Does(body).init, KEY, X)
  calls.clear()
  model = with_policy(Does(body), "mixed_bfloat16", [Rule("mixed_float16", module=nn.Dense)])
  assert operands(model.apply, variables, X) == [("float16", "float16")]
  assert calls == [("outside", "float32")]
  seen_paths = []
  rule = Rule(None, where=lambda m: seen_paths.append(m.path))
  jax.eval_shape(with_policy(Does(body), "mixed_bfloat16", [rule]).apply, variables, X)
  assert set(seen_paths) == {(), ("dense",)}


def two_layers(module, x):
  return nn.Dense(3)(nn.Dense(3)(x))


def test_map_variables_that_runs_its_body_twice_at_init():
  # A cache must not look initialised when the body runs again.
  def caches(module, x):
    there = module.has_variable("cache", "n")
    n = module.variable("cache", "n", lambda: jnp.zeros((), jnp.int32))
    memory = module.variable("cache", "memory", jnp.zeros, x.shape)
    if there:
      n.value = n.value + 1
      memory.value = memory.value + x
    return nn.Dense(3)(memory.value + x)

  lifted = nn.map_variables(
    calling(caches), "params", lambda v: v, lambda v: v, init=True, mutable=True
  )
  plain = lifted().init(KEY, X)
  ours = with_policy(lifted(), "mixed_bfloat16").init(KEY, X)
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  assert int(ours["cache"]["n"]) == int(plain["cache"]["n"])


def differentiates(way):
  # Takes derivatives of a submodule inside of a forward pass, with the cotangent of a user.

  def body(module, x):
    x = nn.Dense(8, name="first")(x)
    dense = nn.Dense(8, name="dense")
    if module.is_initializing():
      return dense(x)
    if way in ("method", "function"):
      fun = nn.Dense.__call__ if way == "method" else lambda dense, x: dense(x)
      out, pullback = nn.vjp(fun, dense, x)
      params, gx = pullback(jnp.ones(out.shape))  # In the dtype that `jnp.ones` has.
      calls.append(("params", str({str(p.dtype) for p in jax.tree.leaves(params)})))
      return out + gx
    if way == "value_and_grad":
      out, (gx,) = nn.value_and_grad(lambda m, x: m(x).sum(), dense, x)
      return out * gx
    tangents = {"params": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}}
    out, tangent = nn.jvp(lambda m, x: m(x), dense, (x,), (jnp.ones_like(x),), tangents)[:2]
    return out + tangent

  return Does(body)


@pytest.mark.parametrize("half", HALF)
def test_derivatives_inside_of_a_forward_pass(half):
  variables = differentiates("method").init(KEY, X)
  models = [differentiates(way) for way in ("method", "function", "jvp", "value_and_grad")]
  calls.clear()
  programs = [program_of(model, f"mixed_{half}", variables=variables) for model in models]
  assert set(calls) == {("params", "{'float32'}")}
  for program, out in programs:
    assert out.dtype == F32
    assert {p.dtypes for p in products(program)} == {(half, half)}
  found, wanted = run(
    lambda v: [
      [model.apply(v, X) for model in models],
      [with_policy(model, f"mixed_{half}").apply(v, X) for model in models],
    ],
    variables,
  )
  for ours, plain in zip(found, wanted, strict=True):
    np.testing.assert_allclose(ours, plain, rtol=0.03, atol=0.03)


# Observing


def observed(module, x):
  x = nn.Dense(3, name="dense")(x)
  module.sow("intermediates", "sown", x)
  module.sow("losses", "norm", jnp.sum(x.astype("float32")))
  x = module.perturb("bump", x)
  return nn.Dense(2, name="last")(x)


OBSERVED = Does(observed)


def test_sown_and_captured_values_keep_the_dtype_they_were_computed_in():
  variables = jax.eval_shape(OBSERVED.init, KEY, X)
  variables = {name: variables[name] for name in ("params", "perturbations")}
  plain, ours = (
    jax.eval_shape(
      lambda v, m=model: m.apply(
        v, X, capture_intermediates=True, mutable=["intermediates", "losses"]
      ),
      variables,
    )
    for model in (OBSERVED, with_policy(OBSERVED, "mixed_bfloat16"))
  )
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  out, kept = ours
  assert out.dtype == F32
  assert dtypes(kept) == {
    "intermediates": {
      "sown": ("bfloat16",),
      "dense": {"__call__": ("bfloat16",)},
      # The float32 sum that the policy returns.
      "last": {"__call__": ("float32",)},
      # Flax captures outside of the interceptor at the root: what the caller sees.
      "__call__": dtypes(kept)["intermediates"]["__call__"],
    },
    "losses": {"norm": ("float32",)},
  }
  made = jax.eval_shape(with_policy(OBSERVED, "mixed_bfloat16").init, KEY, X)
  assert made["perturbations"]["bump"].dtype == BF16


# Interceptors of the user's own


def test_the_users_interceptors_run_inside_and_outside_of_a_policy():
  def logger(name):
    def log(next_fun, args, kwargs, context):
      if context.method_name != "__call__" or not isinstance(context.module, nn.Dense):
        return next_fun(*args, **kwargs)
      calls.append((f"{name} in", str(args[0].dtype)))
      out = next_fun(*args, **kwargs)
      calls.append((f"{name} out", str(out.dtype)))
      return out

    return nn.intercept_methods(log)

  variables = nn.Dense(2).init(KEY, X)
  calls.clear()
  with logger("outer"), scope("mixed_bfloat16"), logger("inner"):
    found = nn.Dense(2).apply(variables, X)
  inner = [("inner in", "float32"), ("inner out", "float32")]
  outer = [("outer in", "float32"), *inner, ("outer out", "float32")]
  # A scope calls the outermost method on a copy, in order to trace it: those outside see both.
  assert calls == [outer[0], *outer, outer[-1]]
  # The float32 sums of products of bfloat16.
  sums = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
  by_hand = nn.Dense(2, dtype=BF16, dot_general=sums).apply(variables, X)
  assert bits(found) == bits(by_hand)

  def body(module, x):
    with logger("inner"):
      return nn.Dense(2)(x)

  calls.clear()
  with logger("outer"):
    ours = with_policy(Does(body), "mixed_bfloat16")
    found = ours.apply({"params": {"Dense_0": variables["params"]}}, X)
  assert calls == outer
  assert bits(found) == bits(by_hand)


@pytest.mark.parametrize("module", [False, True], ids=["arrays", "with a module"])
def test_an_interceptor_that_replaces_arguments_and_outputs(module):
  def double(next_fun, args, kwargs, context):
    if isinstance(context.module, Takes):
      return next_fun(args[0] * 2.0, *args[1:]) * 3.0
    return next_fun(*args, **kwargs)

  class Takes(nn.Module):
    def __call__(self, x, other=None):
      return x

  root = Does(lambda m, x: Takes()(x, nn.Dense(3)) if module else Takes()(x))
  # Once each: outside of the policy, of the scope's root, and inside of both.
  with nn.intercept_methods(double), scope("bfloat16"):
    outside = (root if module else Takes()).apply({}, X)
  with scope("bfloat16"), nn.intercept_methods(double):
    inside = (root if module else Takes()).apply({}, X)
  with nn.intercept_methods(double):
    wrapped = with_policy(root, "bfloat16").apply({}, X)
  for out in (outside, inside, wrapped):
    assert out.dtype == BF16
    np.testing.assert_allclose(np.asarray(out, np.float32), X * 6.0, rtol=2**-7)


UNCHANGED = {
  **{"hard-coded": HardCoded(), "observed": OBSERVED, "vjp": differentiates("method"), **SCANS},
  **{"remat": calling(two_layers, nn.remat)(), "jit": calling(two_layers, nn.jit)()},
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_all_float32_policy_changes_no_program(name):
  model = UNCHANGED[name]
  args = (jnp.zeros((2, 3)), jnp.stack([X] * 2)) if name in SCANS else (X,)
  variables = jax.eval_shape(model.init, KEY, *args)
  ours = with_policy(model, "float32")

  def both(apply):
    return jax.value_and_grad(lambda v, *args: sum(map(jnp.sum, jax.tree.leaves(apply(v, *args)))))

  plain = text(both(model.apply), variables, *args)
  assert text(both(ours.apply), variables, *args) == plain
  assert text(ours.init, KEY, *args) == text(model.init, KEY, *args)
  with scope("float32"):
    assert text(both(model.apply), variables, *args) == plain


# NNX modules that pass through a Linen method


@pytest.mark.slow
def test_a_model_of_nnx_inside_linen_stores_and_trains_in_float32():
  model = nnx.bridge.to_linen(nnx.Linear, 8, 4)
  policied, plain = with_policy(model, "mixed_bfloat16"), model.init(KEY, X)
  variables = policied.init(KEY, X)
  assert operands(policied.apply, variables, X) == [("bfloat16", "bfloat16")]
  _, new = policied.apply(variables, X, mutable=True)
  with scope("mixed_bfloat16"):
    in_scope = model.init(KEY, X)
    assert operands(model.apply, in_scope, X) == [("bfloat16", "bfloat16")]
  for found in (variables, new, in_scope):
    assert bits(found["params"]) == bits(plain["params"])


def test_statistics_of_a_nnx_model_inside_linen_stay_in_float32():
  model = with_policy(nnx.bridge.to_linen(nnx.BatchNorm, 8, momentum=0.5), "mixed_bfloat16")
  variables = model.init(KEY, X)
  # Half of the distance to 1 + 2^-7 in each of two steps: bfloat16 has no number beyond 2^-8.
  for step in (1, 2):
    x = jnp.full((2, 8), 1 + 2.0**-7)
    _, new = model.apply(variables, x, mutable="batch_stats")
    variables = {**variables, **new}
    (mean,) = (
      leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(new)
      if "mean" in jax.tree_util.keystr(path)
    )
    assert mean.dtype == F32
    np.testing.assert_array_equal(mean, np.full(8, (1 + 2.0**-7) * (1 - 0.5**step)))


def test_a_nnx_module_given_to_a_linen_module_keeps_what_it_writes():
  norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
  model = with_policy(Does(lambda m, norm, x: norm(nn.Dense(3)(x))), "mixed_bfloat16")
  variables = {"params": {"Dense_0": {"kernel": jnp.ones((8, 3)), "bias": jnp.full(3, 8.0)}}}
  # It is changed in place, which is Python's and not JAX's.
  with pytest.warns(UserWarning, match="the root: expected a body that can be traced"):
    model.apply(variables, norm, X * 0)
  assert norm.mean[...].tolist() == [4.0] * 3


@pytest.mark.slow
def test_complex_and_integer_modules_are_untouched():
  def fourier(module, z):
    return nn.Dense(3, dtype=jnp.complex64, param_dtype=jnp.complex64)(jnp.fft.fft(z))

  class Lookup(nn.Module):
    dtype: Any = jnp.int8

    @nn.compact
    def __call__(self, ids):
      table = self.param("table", lambda key: jnp.arange(10))
      return table[ids].astype(self.dtype)

  z = X.astype(jnp.complex64) * (1 + 1j)
  for model, x in ((Does(fourier), z), (Lookup(), jnp.asarray([3, 9]))):
    variables = model.init(KEY, x)
    plain, ours = (m.apply(variables, x) for m in (model, with_policy(model, "mixed_bfloat16")))
    assert bits(ours) == bits(plain)
