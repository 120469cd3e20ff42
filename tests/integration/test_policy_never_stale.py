"""The policy observed is the one in force: through every cache, scope, exception and thread."""

import concurrent.futures
import contextlib
import functools
import itertools
import sys
import threading

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import mpjax
from mpjax._policy.active import ACTIVE
from tests.errors import refused
from tests.linen.probes import KEY, Does, Probe, X, calling, calls, note, seen
from tests.programs import compilations, products

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
POLICIES = ["float32", "bfloat16", "float16", None]
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", None: "float32"}


@jax.jit
def inner_product(x, kernel):
  return x @ kernel


def inner_jit(module, x):
  kernel = module.param("kernel", nn.initializers.ones, (x.shape[-1], 2))

  @jax.jit
  def dense(x):
    return nn.Dense(2, parent=None).apply({"params": {"kernel": kernel, "bias": kernel[0]}}, x)

  return inner_product(x, kernel) + dense(x)


Plain = calling(lambda module, x: nn.Dense(2)(x))
JIT_CLASS = Does(lambda module, x: nn.jit(Plain)()(x))
MODELS = {"Plain": Plain(), "JitClass": JIT_CLASS, "InnerJit": Does(inner_jit)}
CASES = pytest.mark.parametrize("name", MODELS)


@functools.cache
def variables_of(name):
  return MODELS[name].init(KEY, X)


def by_hand(name, policy):
  # Returns what a model gives under a policy, computed without mpjax: dtypes written by hand.
  dtype = jnp.dtype(DTYPES[policy])
  params, x = variables_of(name)["params"], X.astype(dtype)
  if name == "InnerJit":
    kernel = params["kernel"].astype(dtype)
    return x @ kernel + (x @ kernel + kernel[:1])
  params = params["JitCalling_0"] if name == "JitClass" else params
  return nn.Dense(2, dtype=dtype).apply({"params": params["Dense_0"]}, x)


@functools.cache
def case(name):
  wanted = {policy: by_hand(name, policy) for policy in POLICIES}
  # They differ, so that a stale one would show.
  assert len({np.asarray(x, np.float32).tobytes() for x in wanted.values()}) == 3
  return MODELS[name], variables_of(name), wanted


def equal(found, wanted):
  assert found.dtype == wanted.dtype
  np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def elsewhere(work):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(work).result()


ROUND = [*POLICIES, *reversed(POLICIES), "bfloat16", "float32", "float16"]


@CASES
def test_wrappers_in_turn_through_one_jitted_function(name):
  model, variables, wanted = case(name)

  @functools.partial(jax.jit, static_argnums=0)
  def forward(model, variables):
    return model.apply(variables, X)

  with compilations() as compiled:
    for policy in ROUND:
      # The wrapper is made anew each time: equal ones are one program.
      equal(forward(with_policy(model, policy), variables), wanted[policy])
  assert compiled["forward"] == len(POLICIES)


@CASES
def test_a_scope_inside_a_jitted_function(name):
  model, variables, wanted = case(name)

  @functools.partial(jax.jit, static_argnums=0)
  def forward(policy, variables):
    with scope(policy):
      inside = model.apply(variables, X)
    return inside, model.apply(variables, X)

  for policy in ("bfloat16", "float16", "float32", "bfloat16"):
    inside, after = forward(policy, variables)
    equal(inside, wanted[policy])
    equal(after, wanted[None])
    equal(model.apply(variables, X), wanted[None])


def test_a_model_that_raises_leaves_nothing_behind():
  def fails(module, x, fail):
    # Raises on the way, as a shape error in the middle of a model does.
    x = nn.Dense(2, name="first")(x)
    if fail:
      raise ZeroDivisionError
    return nn.Dense(2, name="last")(x)

  model = Does(fails)
  variables = model.init(KEY, X, False)
  policied = with_policy(model, "float16")
  before = policied.apply(variables, X, False)
  for call in (policied.apply, jax.jit(policied.apply, static_argnums=2)):
    with pytest.raises(ZeroDivisionError):
      call(variables, X, True)
    assert ACTIVE.value is None
    assert model.apply(variables, X, False).dtype == jnp.float32
    equal(call(variables, X, False), before)


def test_1000_scopes_trace_once():
  # Equal policies are one program: the key is the value, not the object.
  traces = []

  @jax.jit
  def forward(variables):
    traces.append(ACTIVE.value)
    return Plain().apply(variables, X)

  variables = variables_of("Plain")
  for _ in range(1000):
    rules = [Rule("float32", path="Dense_*"), Rule(None, module=Probe)]
    with scope("mixed_bfloat16", rules, unmatched="ignore"):
      forward(variables)
  assert len(traces) == 1


def sign_grad(module, x):
  # Replaces the gradients of a layer by their signs, as Flax's manual does.

  def forward(module, x):
    return nn.vjp(lambda module, x: module(x), module, x)

  def backward(pullback, cotangent):
    calls.append(("backward", str(cotangent.dtype)))
    params, *inputs = pullback(cotangent)
    return jax.tree.map(jnp.sign, params), *inputs

  x = nn.Dense(8, name="first")(x)
  signs = nn.custom_vjp(lambda module, x: module(x), forward_fn=forward, backward_fn=backward)
  return nn.Dense(8, name="last")(signs(nn.Dense(8, name="sign"), x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrapper", "scope", "scope around jit"])
def test_a_custom_backward_of_linen_runs_as_its_forward_did(way):
  # Also when it is traced after the scope was left, or inside another one.
  model = Does(sign_grad)
  variables = model.init(KEY, X)
  apply = with_policy(model, "bfloat16").apply if way == "wrapper" else model.apply
  apply = jax.jit(apply) if "jit" in way else apply
  with scope("bfloat16") if way.startswith("scope") else contextlib.nullcontext():
    out, pullback = jax.vjp(apply, variables, X)
    inside = pullback(jnp.ones_like(out))
  assert out.dtype == jnp.bfloat16
  calls.clear()
  after = pullback(jnp.ones_like(out))
  with scope("float16", unmatched="ignore"):
    in_another = pullback(jnp.ones_like(out))
  # What is pulled back by hand is traced in float32, with or without the scope.
  assert {dtype for _, dtype in calls} == {"float32"}
  with scope("float16", unmatched="ignore"):
    backward = products(jax.make_jaxpr(pullback)(jnp.ones_like(out)))
  assert {p.dtypes for p in backward} == {("bfloat16", "bfloat16")}
  for found in (inside, after, in_another):
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found, inside)
  signs = inside[0]["params"]["sign"]
  assert {abs(float(v)) for leaf in jax.tree.leaves(signs) for v in leaf.ravel()} <= {0.0, 1.0}
  # What is in front of it gets its gradients through a half layer.
  assert np.any(inside[0]["params"]["first"]["kernel"])


def test_a_scope_inside_a_running_call_is_refused():
  def enters(module, x):
    note(module, x)
    with scope("float32"):
      return Probe()(x)

  # Without a policy there is nothing that it would change.
  assert seen(Does(enters).apply, {}, X) == {"": "float32", "Probe_0": "float32"}
  for rules in ([], [Rule("float16", path="**")]):
    with refused(
      RuntimeError,
      *("mpjax.policy_scope(policy)", "outside of a forward pass"),
      "a module that is running already, under the policy 'params=",
      "Pick submodules out with mpjax.Rule",
    ):
      with_policy(Does(enters), "bfloat16", rules).apply({}, X)
    assert ACTIVE.value is None


def held(policy):
  with scope(policy):
    yield


def test_a_generator_that_ends_in_another_thread():
  model, variables = MODELS["Plain"], variables_of("Plain")
  generator = held("bfloat16")
  next(generator)
  elsewhere(generator.close)
  # The thread that entered it notices when it next enters or leaves a scope.
  with scope("float16"):
    assert model.apply(variables, X).dtype == jnp.float16
  assert model.apply(variables, X).dtype == jnp.float32
  assert ACTIVE.value is None


JITTED = {name: jax.jit(model.apply) for name, model in MODELS.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_threads_at_the_same_time(request):
  # Two of them are in each scope. When one has left it, the other is still inside.
  model, variables, wanted = case("Plain")
  jax.clear_caches()  # They fill the tables of JAX at the same time, in turns as short as can be.
  scopes = {policy: scope(policy) for policy in POLICIES}
  inside = threading.Barrier(2 * len(POLICIES), timeout=60)

  def work(policy, leaves_first):
    with scopes[policy]:
      inside.wait()
      if not leaves_first:
        inside.wait()
      calls = 10 * (model.apply, JITTED["Plain"])
      found = [(call(variables, X), wanted[policy]) for call in calls]
    found.append((model.apply(variables, X), wanted[None]))
    if leaves_first:
      inside.wait()
    return found

  request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
  sys.setswitchinterval(1e-6)
  with concurrent.futures.ThreadPoolExecutor(inside.parties) as pool:
    found = pool.map(work, *zip(*itertools.product(POLICIES, (True, False)), strict=True))
  for pair in itertools.chain(*found):
    equal(*pair)


NAMES = st.sampled_from(list(MODELS))
OPERATIONS = st.one_of(
  st.tuples(st.just("enter"), st.sampled_from(POLICIES)),
  st.tuples(st.just("leave"), st.integers(0, 3)),
  st.tuples(st.just("raise"), st.sampled_from(POLICIES)),
  st.tuples(st.sampled_from(["call", "jit"]), NAMES),
  st.tuples(st.just("wrapper"), st.sampled_from(POLICIES)),
  st.tuples(st.just("thread"), st.sampled_from(POLICIES)),
)
EACH_WAY = [("call", "Plain"), *(("jit", name) for name in MODELS)]
IN_TURN = [
  each for policy in ROUND for each in (("enter", policy), *EACH_WAY, ("leave", 0), *EACH_WAY)
]


@pytest.mark.slow
@hypothesis.given(operations=st.lists(OPERATIONS, min_size=3, max_size=10))
@hypothesis.example(operations=IN_TURN)
@hypothesis.example(operations=[("enter", "bfloat16"), *2 * [("raise", "float16")], ("leave", 0)])
@hypothesis.example(operations=[("enter", "bfloat16"), ("thread", "float16"), ("thread", None)])
def test_scopes_that_are_entered_and_left_in_any_order(operations):
  # The oracle is a list of the policies that were entered and not yet left.
  in_force, open_scopes = [], []
  cases = {name: case(name) for name in MODELS}  # Computed outside of all scopes.

  def check(policy, name="Plain", jit=True):
    model, variables, wanted = cases[name]
    equal((JITTED[name] if jit else model.apply)(variables, X), wanted[policy])

  try:
    for kind, value in operations:
      now = in_force[-1] if in_force else None
      if kind == "enter":
        in_force.append(value)
        open_scopes.append(held(value))
        next(open_scopes[-1])
      elif kind == "leave" and in_force:
        # Not always the innermost: generators end in any order.
        place = max(0, len(in_force) - 1 - value)
        del in_force[place]
        open_scopes.pop(place).close()
      elif kind == "raise":
        with contextlib.suppress(ZeroDivisionError), scope(value):
          check(value)
          raise ZeroDivisionError
      elif kind in ("call", "jit"):
        check(now, value, jit=kind == "jit")
      elif kind == "wrapper":
        model, variables, wanted = cases["Plain"]
        equal(with_policy(model, value).apply(variables, X), wanted[value])
      elif kind == "thread":

        def work(policy=value):
          check(None)
          with scope(policy):
            check(policy)
          check(None)

        elsewhere(work)
      check(in_force[-1] if in_force else None)
  finally:
    while open_scopes:
      open_scopes.pop().close()
  assert ACTIVE.value is None
  check(None, jit=False)


def test_the_policy_of_the_lowering_stays_with_what_was_compiled():
  model, variables = MODELS["Plain"], variables_of("Plain")
  with scope("bfloat16"):
    wanted = model.apply(variables, X)
    lowered = jax.jit(model.apply).lower(variables, X)
    exported = jax.export.export(jax.jit(model.apply))(variables, X)
  with scope("float16", unmatched="ignore"):  # No module is traced here.
    assert lowered.out_info.dtype == jnp.bfloat16
    equal(lowered.compile()(variables, X), wanted)
    equal(exported.call(variables, X), wanted)
  with scope("float16"):
    assert jax.jit(model.apply).lower(variables, X).out_info.dtype == jnp.float16


class HoldsJaxpr(nnx.Module):
  def __init__(self):
    self.kernel = nnx.Param(jnp.ones((32, 32)))
    closed = jax.make_jaxpr(jax.jit(lambda w, x: 0.1 * (x @ w) + x))(X32, X32)
    self.inside = jaxpr_as_fun(closed)

  def __call__(self, x):
    return self.inside(self.kernel[...], x)[0]


X32 = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32)


@pytest.mark.slow
def test_a_held_jaxpr_is_rewritten_for_each_reader():
  # JAX traces nothing again in a model that holds a jaxpr, so the rewriter is asked for it again.
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=()))
  fresh, used = (mpjax.with_policy(HoldsJaxpr(), policy) for _ in range(2))
  program, report = str(jax.make_jaxpr(used)(X32)), str(mpjax.sensitivity(used)(X32))
  assert report == str(mpjax.sensitivity(fresh)(X32))
  assert program == str(jax.make_jaxpr(fresh)(X32))
