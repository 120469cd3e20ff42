"""What happens at a call: arguments, fields and results; lifted transforms; errors."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.linen import module as linen_module

import mpjax
from mpjax._core.active import ACTIVE
from tests.linen.products import HALF, KEY, X, all_half, dtypes, operands, text
from tests.programs import bits, products

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16, F16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


calls: list[tuple[str, Any]] = []
"""What modules note while they are traced."""


# Arguments


class Thing:
  """No array, no tree."""


class Pair(NamedTuple):
  x: Any
  n: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  x: Any
  label: Any
  name: str = dataclasses.field(default="train", metadata={"static": True})


class Unsortable(dict):
  """Keys that do not sort make it no tree to JAX."""


class Receives(nn.Module):
  """Puts what it was called with into a list, and multiplies what it can."""

  received: Any

  @nn.compact
  def __call__(self, *args, **kwargs):
    self.received(args, kwargs)
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
    return [jnp.dot(x, x.T) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]


def received_under(policy, *args, **kwargs):
  found = []
  model = Receives(lambda args, kwargs: found.append((args, kwargs)))
  with_policy(model, policy).apply({}, *args, **kwargs)
  ((args, kwargs),) = found
  return args, kwargs


VALUES = {
  "int": 3,
  "float": 0.1,
  "bool": True,
  "complex": 1j,
  "string": "relu",
  "none": None,
  "function": jax.nn.relu,
  "partial": functools.partial(jnp.sum, axis=0),
  "object": Thing(),
  "type": jnp.float32,
  "dtype": F32,
  "numpy": np.ones(2, np.float32),
  "numpy ids": np.asarray([257, 3]),
  "unsortable": Unsortable({1: np.ones(2), "a": np.ones(2)}),
  "set": frozenset({1, 2}),
  "slice": slice(0, 2),
  "ellipsis": ...,
  "module": nn.Dense(2, parent=None),
}

ARRAYS = {
  "ids": jnp.asarray([257, 3]),
  "mask": jnp.asarray([True, False]),
  "key": jax.random.key(0),
  "raw key": jax.random.PRNGKey(0),
  "complex array": jnp.ones(2, jnp.complex64),
  "float32": X,
  "tuple": (1, "a", None, X),
  "dict": {"n": jnp.arange(2), "flag": True},
  "list": [X, [X]],
  "frozen": FrozenDict({"n": 1, "x": X}),
  "named tuple": Pair(X, None),
  "dataclass": Batch(jnp.arange(3), 2),
}


@pytest.mark.case("B059", "B061", "B062", "B096", "A106", "B055", "B056", "B058", "I10")
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_is_no_array_of_jax_is_the_same_object(value):
  """An array of NumPy is a constant: code may look at it while it is traced."""
  (found,), kwargs = received_under("bfloat16", value, key=value)
  assert found is value
  assert kwargs["key"] is value


@pytest.mark.case("B059", "B061", "B062", "B096", "A106", "B055", "B056", "B058", "I10")
@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_arrays_come_in_their_containers_with_their_dtypes(value):
  (found,), kwargs = received_under("bfloat16", value, key=value)
  for each in (found, kwargs["key"]):
    assert type(each) is type(value) or isinstance(value, jax.Array)
    assert jax.tree.structure(each) == jax.tree.structure(value)
    for got, given in zip(jax.tree.leaves(each), jax.tree.leaves(value), strict=True):
      if isinstance(given, jax.Array):
        assert (got.dtype, got.shape) == (given.dtype, given.shape)
      else:
        assert got is given


@pytest.mark.case("B059", "B062")
def test_floating_arrays_are_multiplied_in_half_in_every_container():
  batch = {
    "x": X,
    "nested": [(X, {"y": X}), Pair(X, 3), Batch(X, jnp.arange(2))],
    "frozen": FrozenDict({"x": X}),
    "ids": jnp.asarray([257]),
    "train": True,
    "nothing": None,
  }
  leaves = jax.tree.leaves(batch)
  model = with_policy(Receives(lambda args, kwargs: None), "bfloat16")
  all_half(lambda batch: model.apply({}, {**batch, "train": True}), batch, count=5 + 1)
  # What was passed in is as it was.
  assert all(a is b for a, b in zip(leaves, jax.tree.leaves(batch), strict=True))


@pytest.mark.case("B061")
@pytest.mark.parametrize("half", HALF)
def test_half_arguments_show_as_float32_and_count_as_half(half):
  class Doubles(nn.Module):
    def __call__(self, tree):
      calls.append(("inside", str(tree["x"].dtype)))
      return jax.tree.map(lambda x: x * 2, tree)

  tree = {"x": X.astype(half), "n": 3}
  calls.clear()
  found = with_policy(Doubles(), f"c={half}").apply({}, tree)
  assert set(calls) == {("inside", "float32")}
  assert found["n"] == 6
  assert bits(found["x"]) == bits(tree["x"] * 2)


@pytest.mark.case("B061")
@pytest.mark.parametrize("lift", ["jit", "remat"])
def test_static_arguments_stay_static(lift):
  class Static(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic, sizes, name):
      assert deterministic is True
      assert sizes == (1, 2)
      assert name == "a"
      return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=deterministic)

  numbers = (2, 3, 4)
  if lift == "jit":
    cls = nn.jit(Static, static_argnums=numbers)
  else:
    cls = nn.remat(Static, static_argnums=numbers)
  variables = cls().init(KEY, X, True, (1, 2), "a")
  model = with_policy(cls(), "mixed_bfloat16")
  all_half(lambda v: model.apply(v, X, True, (1, 2), "a"), variables, count=1)


def test_arguments_of_setup_and_of_methods_without_any():
  class Bare(nn.Module):
    def setup(self):
      self.dense = nn.Dense(2)
      self.w = self.param("w", nn.initializers.ones, (2,))

    def constant(self):
      return self.w

    def nothing(self):
      return None

  variables = Bare().init(KEY, method="constant")
  model = with_policy(Bare(), "bfloat16")
  assert model.apply(variables, method="constant").dtype == BF16
  assert model.apply(variables, method="nothing") is None


# Outputs


OUTPUTS = {
  "tuple": lambda x, n: (x, n),
  "list": lambda x, n: [x, [n]],
  "dict": lambda x, n: {"x": x, "n": n},
  "named tuple": lambda x, n: Pair(x, n),
  "dataclass": lambda x, n: Batch(x, n),
  "none": lambda x, n: (None, x, n),
  "frozen": lambda x, n: FrozenDict({"x": x, "n": n}),
  "nested": lambda x, n: {"a": (x, [n, None])},
}


@pytest.mark.case("B053")
@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("lift", ["plain", "remat", "jit"])
def test_outputs_keep_their_structure(make, lift):
  class Returns(nn.Module):
    @nn.compact
    def __call__(self, x):
      return make(nn.Dense(2)(x), jnp.argmax(x, -1))

  cls = {"plain": Returns, "remat": nn.remat(Returns), "jit": nn.jit(Returns)}[lift]
  inside = []

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      out = cls()(x)
      inside.append(jax.tree.structure(out))
      return out

  variables = jax.eval_shape(Root().init, KEY, X)
  wanted = jax.eval_shape(Root().apply, variables, X)
  ours = with_policy(Root(), "mixed_bfloat16")
  found = jax.eval_shape(ours.apply, variables, X)
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  assert dtypes(found) == dtypes(wanted)
  assert len(set(inside)) == 1
  all_half(ours.apply, variables, X, count=1)


@pytest.mark.case("B053")
@pytest.mark.parametrize(
  "value",
  [None, 3, "name", True, (1, None), jnp.arange(3), jnp.ones(2, jnp.complex64), jax.nn.relu],
  ids=["none", "int", "string", "bool", "tuple", "ids", "complex", "function"],
)
def test_outputs_without_floating_arrays_are_the_same_objects(value):
  class Returns(nn.Module):
    def __call__(self):
      return value

  found = with_policy(Returns(), "bfloat16").apply({})
  assert found == value if isinstance(value, tuple) else found is value


# Fields


class Layer(nn.Module):
  """A layer as many models write it: with a `dtype` that it hands to its children."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    calls.append((str(self.name), str(jnp.dtype(self.dtype or "float32"))))
    return nn.Dense(3, dtype=self.dtype)(x)


class HardCoded(nn.Module):
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    x = jnp.asarray(x, self.dtype)
    for name in ("one", "two"):
      x = Layer(jnp.float32, name=name)(x)
    return nn.Dense(3, dtype=jnp.float32, name="last")(x)


@pytest.mark.case("A108", "B038", "B096")
@pytest.mark.parametrize("half", HALF)
def test_a_policy_beats_a_hard_coded_dtype(half):
  variables = jax.eval_shape(HardCoded().init, KEY, X)
  model = with_policy(HardCoded(), f"mixed_{half}")
  assert operands(model.apply, variables, X) == [(half, half)] * 3


@pytest.mark.case("A108", "A86")
def test_an_exempt_module_keeps_its_own_dtype():
  variables = jax.eval_shape(HardCoded().init, KEY, X)
  model = with_policy(HardCoded(), "mixed_bfloat16", [Rule(None, path="two")])
  half, full = ("bfloat16",) * 2, ("float32",) * 2
  assert operands(model.apply, variables, X) == [half, full, half]

  class Hands(nn.Module):
    """Hands the dtype that it was given to a child, which a rule leaves as it is."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
      return Layer(self.dtype, name="child")(Layer(self.dtype, name="other")(x))

  half, full = ("bfloat16",) * 2, ("float32",) * 2
  for own in (None, jnp.float32):
    variables = jax.eval_shape(Hands(own).init, KEY, X)
    calls.clear()
    model = with_policy(Hands(own), "mixed_bfloat16", [Rule(None, path="child")])
    assert operands(model.apply, variables, X) == [half, full]
    assert calls == [("other", "float32"), ("child", "float32")]


class WithSub(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(3, name="before")(x)
    return Excluded(name="excluded")(x)


class Excluded(nn.Module):
  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.ones, (3, 3))
    return nn.Dense(3)(jnp.tanh(x.astype("float32") @ w))


@pytest.mark.case("A86", "A108")
def test_the_program_of_an_excluded_module_is_unchanged():
  variables = jax.eval_shape(WithSub().init, KEY, X)
  model = with_policy(WithSub(), "mixed_bfloat16", [Rule(None, path="excluded")])
  sub = nn.jit(Excluded)

  class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(3, name="before")(x)
      return sub(name="excluded")(x.astype("float32"))

  def inner(apply):
    """Returns the equations of the excluded module, which `nn.jit` keeps in one piece.

    A cast that widens what comes from outside is the policy's of the module around it.
    """
    jaxpr = jax.make_jaxpr(apply)(variables, X).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if "jaxpr" in e.params and "dot_general" in str(e.params)]
    return [
      (str(e.primitive), dtypes([v.aval for v in e.outvars]), str(e.params))
      for e in eqn.params["jaxpr"].eqns
      if e.primitive.name != "convert_element_type" or e.outvars[0].aval.dtype != F32
    ]

  ours = with_policy(Jitted(), "mixed_bfloat16", [Rule(None, path="excluded")])
  assert inner(ours.apply) == inner(Jitted().apply)
  assert "bfloat16" not in str(inner(ours.apply))
  assert "bfloat16" in str(inner(with_policy(Jitted(), "mixed_bfloat16").apply))
  assert operands(model.apply, variables, X)[0] == ("bfloat16", "bfloat16")
  assert operands(model.apply, variables, X)[1:] == [("float32", "float32")] * 2


@pytest.mark.case("A86")
def test_a_root_that_is_exempt_is_unchanged():
  variables = jax.eval_shape(HardCoded().init, KEY, X)
  model = with_policy(HardCoded(), "mixed_bfloat16", [Rule(None, path="**")])
  assert text(model.apply, variables, X) == text(HardCoded().apply, variables, X)
  assert text(with_policy(HardCoded(), None).apply, variables, X) == text(
    HardCoded().apply, variables, X
  )


def test_fields_are_restored_after_a_call_and_after_an_exception():
  class Fails(nn.Module):
    dtype: Any = jnp.float16

    def __call__(self, x, fail=False):
      calls.append(("inside", str(jnp.dtype(self.dtype))))
      if fail:
        raise ZeroDivisionError
      return x

  class Root(nn.Module):
    def setup(self):
      self.child = Fails()

    def __call__(self, x):
      self.child(x)
      before = self.child.dtype
      try:
        self.child(x, fail=True)
      except ZeroDivisionError:
        calls.append(("after", str(jnp.dtype(self.child.dtype))))
      assert before is jnp.float16
      return x

  calls.clear()
  with_policy(Root(), "bfloat16").apply({}, X)
  # It would round to the dtype of its own. The policy decides in the program.
  assert calls == [("inside", "float32"), ("inside", "float32"), ("after", "float16")]
  assert ACTIVE.value is None


class Reads(nn.Module):
  dtype: Any

  def __call__(self):
    calls.append(("dtype", self.dtype))


FIELDS = [
  (jnp.float32, jnp.float32, jnp.bfloat16),
  (None, None, jnp.bfloat16),
  (np.float32, np.float32, jnp.bfloat16),
  ("float32", "float32", "bfloat16"),
  (np.dtype("float32"), np.dtype("float32"), jnp.bfloat16),
  (jnp.float16, jnp.float32, jnp.bfloat16),
  (jnp.bfloat16, jnp.float32, jnp.bfloat16),
  ("float16", "float32", "bfloat16"),
  (jnp.complex64, jnp.complex64, jnp.complex64),
  (jnp.int32, jnp.int32, jnp.int32),
  ("not a dtype", "not a dtype", "not a dtype"),
]


@pytest.mark.parametrize(("own", "traced", "casting"), FIELDS, ids=[repr(f[0]) for f in FIELDS])
@pytest.mark.case("B099", "A108")
def test_the_dtype_field_during_a_call(own, traced, casting):
  def same(dtype, wanted):
    # Code compares with `is jnp.bfloat16`, or looks a string up.
    return dtype == wanted if isinstance(wanted, str) else dtype is wanted

  calls.clear()
  with_policy(Reads(own), "bfloat16").apply({})
  ((_, dtype),) = calls
  assert same(dtype, traced)
  # To tell the dtypes of what `init` makes it is that of the policy; then nothing is changed.
  calls.clear()
  with_policy(Reads(own), "bfloat16").init(KEY)
  (_, first), (_, second) = calls
  assert same(first, casting)
  assert second is own


@pytest.mark.parametrize("own", [jnp.float32, jnp.bfloat16])
def test_what_setup_makes_of_the_dtype_field_is_traced_in_float32(own):
  class Sets(nn.Module):
    dtype: Any = own

    def setup(self):
      calls.append(("setup", str(jnp.dtype(self.dtype))))
      self.dense = nn.Dense(2, dtype=self.dtype)
      self.table = jnp.ones((3, 3), self.dtype)

    def __call__(self, x):
      calls.append(("table", str(self.table.dtype)))
      return self.dense(x @ self.table)

  variables = jax.eval_shape(Sets().init, KEY, X)
  for half in HALF:
    calls.clear()
    model = with_policy(Sets(), f"mixed_{half}")
    assert operands(model.apply, variables, X) == [(half, half)] * 2
    assert calls == [("setup", "float32"), ("table", "float32")]


# Mixed and integer inputs


@pytest.mark.case("A118", "A91")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
@pytest.mark.parametrize("half", HALF)
def test_inputs_of_any_dtype_give_what_dtype_by_hand_gives(dtype, half):
  x = jnp.asarray([[1, 0, 1], [0, 1, 1]]).astype(dtype)
  variables = nn.Dense(2).init(KEY, X)
  by_hand = nn.Dense(2, dtype=half).apply(variables, x)
  ours = with_policy(nn.Dense(2), f"c={half}").apply(variables, x)
  assert bits(ours) == bits(by_hand)
  # Without a policy integers promote to the float32 of the parameters.
  if dtype == "int32":
    assert nn.Dense(2).apply(variables, x).dtype == F32


@pytest.mark.case("A91")
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16"])
def test_all_four_mixes_of_input_and_weight(x_dtype, w_dtype):
  variables = jax.tree.map(lambda p: p.astype(w_dtype), nn.Dense(2).init(KEY, X))
  x = X.astype(x_dtype)
  assert with_policy(nn.Dense(2), "bfloat16").apply(variables, x).dtype == BF16
  by_itself = jnp.promote_types(x_dtype, w_dtype)
  assert nn.Dense(2).apply(variables, x).dtype == by_itself


@pytest.mark.case("B099")
def test_complex_and_integer_modules_are_untouched():
  class Fourier(nn.Module):
    @nn.compact
    def __call__(self, z):
      return nn.Dense(3, dtype=jnp.complex64, param_dtype=jnp.complex64)(jnp.fft.fft(z))

  class Lookup(nn.Module):
    dtype: Any = jnp.int32

    @nn.compact
    def __call__(self, ids):
      table = self.param("table", lambda key: jnp.arange(10))
      return table[ids].astype(self.dtype)

  z = X.astype(jnp.complex64) * (1 + 1j)
  for model, x in ((Fourier(), z), (nn.Dense(2), z), (Lookup(), jnp.asarray([3, 9]))):
    variables = model.init(KEY, x)
    plain, ours = (m.apply(variables, x) for m in (model, with_policy(model, "mixed_bfloat16")))
    assert ours.dtype == plain.dtype
    if jnp.iscomplexobj(plain):
      # Only the real weights of the second model are read in half.
      np.testing.assert_allclose(ours, plain, rtol=2e-2, atol=2e-2)
      assert np.any(np.imag(ours))
    else:
      assert bits(ours) == bits(plain)


# Lifted transforms


class Cell(nn.Module):
  """The body of a scan over layers or over time."""

  @nn.compact
  def __call__(self, carry, x):
    calls.append(("carry", str(carry.dtype)))
    calls.append(("x", str(x.dtype)))
    y = nn.Dense(3)(x)
    return carry + y.astype(carry.dtype), y


class ScanClass(nn.Module):
  @nn.compact
  def __call__(self, carry, xs):
    cls = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False})
    return cls(name="cell")(carry, xs)


class ScanFunction(nn.Module):
  """The body is a function: it reaches the interceptor as a method that no class has."""

  @nn.compact
  def __call__(self, carry, xs):
    scan = nn.scan(
      lambda cell, carry, x: cell(carry, x),
      variable_broadcast="params",
      split_rngs={"params": False},
    )
    return scan(Cell(name="cell"), carry, xs)


class ScanMethod(nn.Module):
  @functools.partial(nn.scan, variable_broadcast="params", split_rngs={"params": False})
  @nn.compact
  def __call__(self, carry, x):
    calls.append(("carry", str(carry.dtype)))
    calls.append(("x", str(x.dtype)))
    y = nn.Dense(3)(x)
    return carry + y.astype(carry.dtype), y


class ScanRemat(nn.Module):
  @nn.compact
  def __call__(self, carry, xs):
    cls = nn.scan(
      nn.remat(Cell, prevent_cse=False), variable_broadcast="params", split_rngs={"params": False}
    )
    return cls(name="cell")(carry, xs)


class ScanOver(nn.Module):
  """A module that is scanned as an attribute, with its parameters stacked."""

  @nn.compact
  def __call__(self, carry, xs):
    cls = nn.scan(Cell, variable_axes={"params": 0}, split_rngs={"params": True})
    return cls(name="cell")(carry, xs)


SCANS = (ScanClass, ScanFunction, ScanMethod, ScanRemat, ScanOver)


@pytest.mark.case("B073", "A76")
@pytest.mark.parametrize("cls", SCANS)
@pytest.mark.parametrize("carry", ["float32", "bfloat16"])
def test_a_carry_keeps_its_dtype(cls, carry):
  # The type of a carry is the caller's: float32 for a sum that must be exact.
  start, xs = jnp.zeros((2, 3), carry), jnp.stack([X] * 4)
  variables = jax.eval_shape(cls().init, KEY, start, xs)

  class Root(nn.Module):
    @nn.compact
    def __call__(self, xs):
      return cls(name="scan")(jnp.zeros((2, 3), carry), xs)

  variables = {"params": {"scan": variables["params"]}}
  calls.clear()
  model = with_policy(Root(), "c=bf16")
  end, ys = jax.eval_shape(model.apply, variables, xs)
  found = {dtype for kind, dtype in calls if kind == "carry"}
  assert found == {carry}
  assert ys.dtype == BF16
  assert end.dtype == jnp.dtype(carry)
  all_half(model.apply, variables, xs, count=1)
  made = jax.eval_shape(model.init, KEY, xs)
  assert set(jax.tree.leaves(dtypes(made))) == {"float32"}
  grads = jax.eval_shape(
    jax.grad(lambda v: model.apply(v, xs)[1].sum().astype("float32")), variables
  )
  assert dtypes(grads) == dtypes(variables)


@pytest.mark.case("B073")
def test_a_function_that_carries_what_a_layer_hands_on():
  """The layer hands on half; the loop goes on with the dtype that it began with."""

  class Loops(nn.Module):
    @nn.compact
    def __call__(self, xs):
      def body(dense, carry, x):
        calls.append(("carry", str(carry.dtype)))
        return dense(carry) + x, dense(carry)

      scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
      end, ys = scan(nn.Dense(3, name="dense"), jnp.zeros((2, 3)), xs)
      calls.append(("end", str(end.dtype)))
      return ys

  xs = jnp.stack([X] * 3)
  variables = jax.eval_shape(Loops().init, KEY, xs)
  calls.clear()
  model = with_policy(Loops(), "mixed_bfloat16")
  assert jax.eval_shape(model.apply, variables, xs).dtype == F32
  assert set(calls) == {("carry", "float32"), ("end", "float32")}
  all_half(model.apply, variables, xs, count=2)


@pytest.mark.case("B072")
@pytest.mark.parametrize("cls", SCANS[:2] + SCANS[3:])
def test_class_rules_match_the_base_class_of_a_lifted_one(cls):
  start, xs = jnp.zeros((2, 3)), jnp.stack([X] * 4)
  variables = jax.eval_shape(cls().init, KEY, start, xs)
  model = with_policy(cls(), "mixed_bfloat16", [Rule("mixed_float16", module=Cell)])
  assert operands(model.apply, variables, start, xs) == [("float16", "float16")]
  # A rule on what is inside of the body fires there, and does so once.
  model = with_policy(cls(), "mixed_bfloat16", [Rule("mixed_float16", module=nn.Dense)])
  calls.clear()
  program = jax.make_jaxpr(model.apply)(variables, start, xs)
  assert [p.dtypes for p in products(program)] == [("float16", "float16")]
  (loop,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
  # The input, the kernel and the bias, each once.
  assert str(loop.params["jaxpr"]).count("new_dtype=float16") == 3


@pytest.mark.case("B072", "A76")
def test_a_function_under_remat_is_no_module():
  class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
      x, n = nn.remat(lambda module, x: (nn.Dense(3, name="dense")(x), jnp.arange(2)))(self, x)
      assert n.dtype == jnp.int32
      calls.append(("handed on", str(x.dtype)))
      return x

  variables = jax.eval_shape(Body().init, KEY, X)
  calls.clear()
  model = with_policy(Body(), "mixed_bfloat16", [Rule("mixed_float16", module=nn.Dense)])
  assert operands(model.apply, variables, X) == [("float16", "float16")]
  assert calls == [("handed on", "float32")]
  seen_paths = []
  model = with_policy(
    Body(), "mixed_bfloat16", [Rule(None, where=lambda m: seen_paths.append(m.path))]
  )
  jax.eval_shape(model.apply, variables, X)
  assert set(seen_paths) == {(), ("dense",)}


class RematMethod(nn.Module):
  @nn.remat
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.Dense(3)(x))


class JitMethod(nn.Module):
  @nn.jit
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.Dense(3)(x))


class VmapMethod(nn.Module):
  @functools.partial(nn.vmap, variable_axes={"params": None}, split_rngs={"params": False})
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.Dense(3)(x))


@pytest.mark.case("B072", "A76")
@pytest.mark.parametrize("cls", [RematMethod, JitMethod, VmapMethod])
@pytest.mark.parametrize("place", ["root", "child"])
def test_decorated_methods(cls, place):
  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      return cls(name="child")(x)

  model = cls() if place == "root" else Root()
  variables = jax.eval_shape(model.init, KEY, X)
  all_half(with_policy(model, "mixed_bfloat16").apply, variables, X, count=2)
  assert jax.eval_shape(with_policy(model, "mixed_bfloat16").apply, variables, X).dtype == F32
  rules = [Rule("mixed_float16", module=cls)]
  ours = with_policy(model, "mixed_bfloat16", rules)
  assert operands(ours.apply, variables, X) == [("float16", "float16")] * 2


@pytest.mark.case("A76")
def test_remat_changes_no_dtype_and_no_gradient():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      return x + nn.Dense(3)(nn.tanh(nn.Dense(3)(x)))

  plain, remat = Block(), nn.remat(Block)()
  variables = plain.init(KEY, X)

  def grads(model):
    ours = with_policy(model, "mixed_bfloat16")
    return jax.jit(jax.grad(lambda v: ours.apply(v, X).sum()))(variables)

  assert bits(grads(plain)) == bits(grads(remat))


BRANCHES = {
  "cond": lambda module, x, n: nn.cond(
    n > 0,
    lambda m, x: m.dense(x),
    lambda m, x: jnp.zeros((2, 3)),  # a float32 constant
    module,
    x,
  ),
  "switch": lambda module, x, n: nn.switch(
    n, [lambda m, x: m.dense(x), lambda m, x: jnp.ones((2, 3)), lambda m, x: x], module, x
  ),
}


@pytest.mark.case("B072", "B096")
@pytest.mark.parametrize("fun", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_branches_agree_on_a_dtype(fun, policy):
  class Branches(nn.Module):
    def setup(self):
      self.dense = nn.Dense(3)

    def __call__(self, x, n):
      if self.is_initializing():
        self.dense(x)
      return fun(self, x, n)

  n = jnp.asarray(1)
  variables = jax.eval_shape(Branches().init, KEY, X, n)
  model = with_policy(Branches(), policy)
  assert jax.eval_shape(model.apply, variables, X, n).dtype == F32
  if policy == "mixed_bfloat16":
    all_half(model.apply, variables, X, n, count=1)
  grads = jax.eval_shape(jax.grad(lambda v: model.apply(v, X, n).sum()), variables)
  assert dtypes(grads) == dtypes(variables)


@pytest.mark.case("B072", "B073")
@pytest.mark.parametrize("carry", ["float32", "bfloat16"])
def test_a_while_loop_keeps_the_dtype_of_what_it_carries(carry):
  class Loops(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = nn.Dense(3, name="dense")
      if self.is_initializing():
        return dense(x)

      def body(module, carry):
        return carry[0] + 1, module(carry[1])

      start = (jnp.zeros((), jnp.int32), x.astype(carry))
      _, out = nn.while_loop(lambda m, c: c[0] < 3, body, dense, start)
      calls.append(("out", str(out.dtype)))
      return out

  variables = jax.eval_shape(Loops().init, KEY, X)
  calls.clear()
  model = with_policy(Loops(), "mixed_bfloat16")
  assert jax.eval_shape(model.apply, variables, X).dtype == F32
  assert calls == [("out", carry)]
  all_half(model.apply, variables, X, count=1)


@pytest.mark.case("B092")
def test_map_variables():
  class Unit(nn.Module):
    """A Dense whose kernel is normalised where it is read."""

    @nn.compact
    def __call__(self, x):
      def unit(variables):
        return jax.tree.map(lambda w: w / jnp.linalg.norm(w), variables)

      return nn.map_variables(nn.Dense, "params", unit, init=self.is_initializing())(3)(x)

  variables = jax.eval_shape(Unit().init, KEY, X)
  assert dtypes(jax.eval_shape(with_policy(Unit(), "mixed_bfloat16").init, KEY, X)) == dtypes(
    variables
  )
  all_half(with_policy(Unit(), "mixed_bfloat16").apply, variables, X, count=1)


@pytest.mark.case("B087", "A106")
def test_map_variables_that_runs_its_body_twice_at_init():
  """A cache must not look initialised when the body runs again."""

  class Caches(nn.Module):
    @nn.compact
    def __call__(self, x):
      there = self.has_variable("cache", "n")
      n = self.variable("cache", "n", lambda: jnp.zeros((), jnp.int32))
      memory = self.variable("cache", "memory", jnp.zeros, x.shape)
      if there:
        n.value = n.value + 1
        memory.value = memory.value + x
      return nn.Dense(3)(memory.value + x)

  lifted = nn.map_variables(Caches, "params", lambda v: v, lambda v: v, init=True, mutable=True)
  plain = lifted().init(KEY, X)
  ours = with_policy(lifted(), "mixed_bfloat16").init(KEY, X)
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  assert int(ours["cache"]["n"]) == int(plain["cache"]["n"])


@pytest.mark.case("B095")
def test_share_scope():
  class Outer(nn.Module):
    def setup(self):
      self.inner = nn.Dense(3)
      nn.share_scope(self, self.inner)

    def __call__(self, x):
      return self.inner(x)

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Outer(name="outer")(x)

  variables = jax.eval_shape(Root().init, KEY, X)
  assert set(variables["params"]["outer"]) == {"kernel", "bias"}
  all_half(with_policy(Root(), "mixed_bfloat16").apply, variables, X, count=1)
  rules = [Rule("mixed_float16", path="outer")]
  assert operands(with_policy(Root(), "mixed_bfloat16", rules).apply, variables, X) == [
    ("float16", "float16")
  ]


class Differentiates(nn.Module):
  """Takes derivatives of a submodule inside of its forward pass."""

  way: str

  @nn.compact
  def __call__(self, x):
    dense = nn.Dense(3, name="dense")
    if self.is_initializing():
      return dense(x)
    if self.way == "vjp":
      out, pullback = nn.vjp(lambda m, x: m(x), dense, x)
      calls.append(("out", str(out.dtype)))
      params, gx = pullback(jnp.ones_like(out))
      calls.append(("params", str({str(p.dtype) for p in jax.tree.leaves(params)})))
      return out + gx
    if self.way == "value_and_grad":
      out, (gx,) = nn.value_and_grad(lambda m, x: m(x).sum(), dense, x)
      return out * gx
    tangents = {"params": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}}
    out, tangent = nn.jvp(lambda m, x: m(x), dense, (x,), (jnp.ones_like(x),), tangents)[:2]
    return out + tangent


@pytest.mark.case("A72", "B076")
@pytest.mark.parametrize("way", ["vjp", "jvp", "value_and_grad"])
def test_derivatives_inside_of_a_forward_pass(way):
  model = Differentiates(way)
  variables = model.init(KEY, X)
  calls.clear()
  ours = with_policy(model, "mixed_bfloat16")
  found = ours.apply(variables, X)
  assert found.dtype == F32
  assert dict(calls).get("params", "{'float32'}") == "{'float32'}"
  np.testing.assert_allclose(found, model.apply(variables, X), rtol=0.03, atol=0.03)
  all_half(ours.apply, variables, X)


# Observing


class Observed(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(3, name="dense")(x)
    self.sow("intermediates", "sown", x)
    self.sow("losses", "norm", jnp.sum(x.astype("float32")))
    x = self.perturb("bump", x)
    return nn.Dense(2, name="last")(x)


@pytest.mark.case("B097")
@pytest.mark.parametrize("half", HALF)
def test_what_is_sown_and_captured_is_in_the_dtype_it_has_inside(half):
  variables = {k: v for k, v in Observed().init(KEY, X).items() if k in ("params", "perturbations")}
  out, kept = with_policy(Observed(), f"mixed_{half}").apply(
    variables, X, capture_intermediates=True, mutable=["intermediates", "losses"]
  )
  assert out.dtype == F32
  _, plain = Observed().apply(
    variables, X, capture_intermediates=True, mutable=["intermediates", "losses"]
  )
  assert jax.tree.structure(kept) == jax.tree.structure(plain)
  assert dtypes(kept) == {
    "intermediates": {
      "sown": (half,),
      "dense": {"__call__": (half,)},
      "last": {"__call__": (half,)},
      # Flax captures outside of the interceptor at the root: what the caller sees.
      "__call__": dtypes(kept)["intermediates"]["__call__"],
    },
    "losses": {"norm": ("float32",)},
  }


@pytest.mark.case("B097")
@pytest.mark.parametrize("half", HALF)
def test_gradients_of_perturbations(half):
  variables = Observed().init(KEY, X)
  assert variables["perturbations"]["bump"].dtype == F32
  ours = with_policy(Observed(), f"mixed_{half}")
  assert dtypes(ours.init(KEY, X)["perturbations"]) == {
    "bump": dtypes(jax.eval_shape(ours.init, KEY, X))["perturbations"]["bump"]
  }

  def loss(perturbations, model):
    return model.apply({**variables, "perturbations": perturbations}, X).sum()

  found, wanted = (
    jax.grad(loss)(variables["perturbations"], model)["bump"] for model in (ours, Observed())
  )
  assert found.dtype == F32
  # d sum(x W) / dx is the row sums of W: the half weights, added in half.
  np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-7 * 4)


# Interceptors of the user's own


@pytest.mark.case("A101")
@pytest.mark.parametrize("half", HALF)
def test_the_users_interceptors_run_inside_and_outside_of_a_policy(half):
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
  with logger("outer"), scope(f"mixed_{half}"), logger("inner"):
    found = nn.Dense(2).apply(variables, X)
  inner = [("inner in", "float32"), ("inner out", "float32")]
  outer = [("outer in", "float32"), *inner, ("outer out", "float32")]
  # A scope calls the outermost method on a copy, in order to trace it: those outside see both.
  assert calls == [outer[0], *outer, outer[-1]]
  by_hand = nn.Dense(2, dtype=half).apply(variables, X)
  assert bits(found) == bits(by_hand.astype("float32"))

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      with logger("inner"):
        return nn.Dense(2)(x)

  calls.clear()
  with logger("outer"):
    ours = with_policy(Root(), f"mixed_{half}")
    found = ours.apply({"params": {"Dense_0": variables["params"]}}, X)
  assert calls == outer
  assert bits(found) == bits(by_hand.astype("float32"))


@pytest.mark.case("A101")
@pytest.mark.parametrize("module", [False, True], ids=["arrays", "with a module"])
def test_an_interceptor_that_replaces_arguments_and_outputs(module):
  def double(next_fun, args, kwargs, context):
    if isinstance(context.module, Takes):
      return next_fun(args[0] * 2.0, *args[1:]) * 3.0
    return next_fun(*args, **kwargs)

  class Takes(nn.Module):
    def __call__(self, x, other=None):
      return x

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Takes()(x, nn.Dense(3)) if module else Takes()(x)

  # Once each: outside of the policy, of the scope's root, and inside of both.
  with nn.intercept_methods(double), scope("bfloat16"):
    outside = (Root() if module else Takes()).apply({}, X)
  with scope("bfloat16"), nn.intercept_methods(double):
    inside = (Root() if module else Takes()).apply({}, X)
  with nn.intercept_methods(double):
    wrapped = with_policy(Root(), "bfloat16").apply({}, X)
  for out in (outside, inside, wrapped):
    assert out.dtype == BF16
    np.testing.assert_allclose(np.asarray(out, np.float32), X * 6.0, rtol=2**-7)


def test_nothing_of_ours_is_left_in_place():
  with scope("bfloat16"), scope("float16"):
    nn.Dense(2).init_with_output(KEY, X)
  found = []

  def spy(next_fun, args, kwargs, context):
    found.append(next_fun)
    return next_fun(*args, **kwargs)

  with nn.intercept_methods(spy):
    nn.Dense(2).init_with_output(KEY, X)
  assert found
  assert all("mpjax" not in getattr(f, "__module__", "") for f in found)
  assert linen_module.InterceptorContext is nn.module.InterceptorContext


# Errors


class Mixes(nn.Module):
  """Uses `jax.lax` on operands of two dtypes, which does not promote."""

  buffer: Any = jnp.bfloat16

  @nn.compact
  def __call__(self, x):
    return jax.lax.dynamic_update_slice(jnp.zeros((4, 3), self.buffer), x, (0, 0))


@pytest.mark.parametrize("lift", ["plain", "remat"])
def test_a_type_error_names_the_module(lift):
  cls = nn.remat(Mixes) if lift == "remat" else Mixes

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      return cls(name="mixes")(x)

  model = Root()
  with pytest.raises(TypeError) as excinfo:
    with_policy(model, "mixed_float16").apply({}, X)
  # It is the user's own error, with one note.
  assert not isinstance(excinfo.value, mpjax.MpjaxError)
  (mine,) = [n for n in excinfo.value.__notes__ if "mpjax" in n]
  assert "'mixes' (" in mine
  assert "Mixes)" in mine
  assert "compute=float16" in mine
  assert "mpjax.Rule(None, path='mixes')" in mine
  # In the dtype that it takes, it runs.
  advised = with_policy(model, "mixed_float16", [Rule("bfloat16", path="mixes")])
  assert advised.apply({}, X).dtype == F32


@pytest.mark.parametrize("half", HALF)
def test_float32_operands_that_do_not_promote_are_no_error(half):
  out = with_policy(Mixes(jnp.float32), f"mixed_{half}").apply({}, X)
  np.testing.assert_array_equal(out[:2], X)  # It meets no product.


def test_errors_of_other_kinds_and_without_a_policy_get_no_note():
  class Raises(nn.Module):
    def __call__(self, error):
      raise error

  for model, error in (
    (with_policy(Raises(), "bfloat16"), ValueError("x")),
    (Raises(), TypeError("x")),
    (with_policy(Raises(), None), TypeError("x")),
  ):
    with pytest.raises(type(error)) as excinfo:
      model.apply({}, error)
    assert not [n for n in getattr(excinfo.value, "__notes__", ()) if "mpjax" in n]


@pytest.mark.case("I8")
@pytest.mark.parametrize(
  "model",
  [
    HardCoded(),
    WithSub(),
    RematMethod(),
    JitMethod(),
    Observed(),
    nn.Sequential([nn.Dense(3), nn.LayerNorm(), nn.relu, nn.Dense(2)]),
    nn.remat(WithSub)(),
    Differentiates("vjp"),
  ],
  ids=lambda model: type(model).__name__,
)
def test_an_all_float32_policy_changes_no_program(model):
  variables = jax.eval_shape(model.init, KEY, X)
  ours = with_policy(model, "float32")
  assert text(ours.apply, variables, X) == text(model.apply, variables, X)

  def grad(apply):
    return jax.grad(lambda v: jnp.sum(apply(v, X)))

  assert text(grad(ours.apply), variables) == text(grad(model.apply), variables)
  assert text(ours.init, KEY, X) == text(model.init, KEY, X)
  with scope("float32"):
    assert text(model.apply, variables, X) == text(lambda v, x: ours.apply(v, x), variables, X)


@pytest.mark.case("I8")
@pytest.mark.parametrize("cls", SCANS)
def test_an_all_float32_policy_changes_no_scan(cls):
  start, xs = jnp.zeros((2, 3)), jnp.stack([X] * 2)
  variables = jax.eval_shape(cls().init, KEY, start, xs)
  ours = with_policy(cls(), "float32")
  assert text(ours.apply, variables, start, xs) == text(cls().apply, variables, start, xs)


class PullsBack(nn.Module):
  """Writes its cotangent in the dtype that `jnp.ones` has, as one does in float32."""

  body: Any

  @nn.compact
  def __call__(self, x):
    out, pullback = nn.vjp(self.body, nn.Dense(3), x)
    return pullback(jnp.ones(out.shape))[1]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(
  "body", [nn.Dense.__call__, lambda dense, x: dense(x)], ids=["method", "function"]
)
def test_what_is_pulled_back_takes_a_float32_cotangent(policy, body):
  model = PullsBack(body)
  variables = model.init(KEY, X)
  gradient = with_policy(model, policy).apply(variables, X)
  expected = np.asarray(variables["params"]["Dense_0"]["kernel"], np.float64).sum(1)
  np.testing.assert_allclose(gradient, np.broadcast_to(expected, X.shape), rtol=2e-2)
  found = operands(with_policy(model, policy).apply, variables, X)
  assert all(dtypes == (policy[6:],) * 2 for dtypes in found)


# NNX modules that pass through a Linen method


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("scoped", [False, True])
def test_a_model_of_nnx_inside_linen_stores_and_trains_in_float32(half, scoped):
  model = nnx.bridge.to_linen(nnx.Linear, 3, 4)
  plain = model.init(KEY, X)
  if scoped:
    with scope(f"mixed_{half}"):
      variables = model.init(KEY, X)
      found = operands(model.apply, variables, X)
  else:
    policied = with_policy(model, f"mixed_{half}")
    variables = policied.init(KEY, X)
    found = operands(policied.apply, variables, X)
    _, new = policied.apply(variables, X, mutable=True)
    assert bits(new["params"]) == bits(plain["params"])
  assert bits(variables["params"]) == bits(plain["params"])
  assert found == [(half, half)]


def test_statistics_of_a_nnx_model_inside_linen_stay_in_float32():
  model = nnx.bridge.to_linen(nnx.BatchNorm, 3, momentum=0.99)
  policied = with_policy(model, "mixed_bfloat16")
  variables, x = policied.init(KEY, X), jnp.ones((2, 3)).at[0].set(19.0)
  step = jax.jit(lambda stats, x: policied.apply({**variables, **stats}, x, mutable="batch_stats"))
  stats = {"batch_stats": variables["batch_stats"]}
  for _ in range(50):
    stats = step(stats, x)[1]
  # In bfloat16 the mean would stop where a hundredth of the distance is less than half a step.
  wanted = np.full(3, 10 * (1 - 0.99**50))
  np.testing.assert_allclose(stats["batch_stats"]["mean"], wanted, rtol=1e-5)


def test_a_nnx_module_given_to_a_linen_module_keeps_what_it_writes():
  class Reads(nn.Module):
    @nn.compact
    def __call__(self, norm, x):
      return norm(nn.Dense(3)(x))

  norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
  model = with_policy(Reads(), "mixed_bfloat16")
  variables = Reads().init(KEY, nnx.BatchNorm(3, rngs=nnx.Rngs(0)), X)
  variables["params"]["Dense_0"]["bias"] = jnp.full(3, 8.0)
  # It is changed in place, which is Python's and not JAX's.
  with pytest.warns(UserWarning, match="the root: expected a body that can be traced"):
    model.apply(variables, norm, X * 0)
  assert norm.mean[...].tolist() == [4.0] * 3


class Tanh(nn.Module):
  @nn.compact
  def __call__(self, carry, x):
    carry = jnp.tanh(nn.Dense(8)(x) + carry)
    return carry, carry


class Maps(nn.Module):
  """Scans over a cell that is mapped, from a float32 start."""

  remat: bool = False

  @nn.compact
  def __call__(self, xs):
    cell = nn.vmap(Tanh, variable_axes={"params": 0}, split_rngs={"params": True})
    if self.remat:
      cell = nn.remat(cell)
    scan = nn.scan(cell, variable_broadcast="params", split_rngs={"params": False})
    return scan()(jnp.zeros((2, 8)), xs)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_a_mapped_cell_keeps_its_float32_carry(half, remat):
  xs = jnp.linspace(-1.0, 1.0, 30).reshape(5, 2, 3)
  model, policy = Maps(remat), f"params=float32,compute={half}"
  variables = with_policy(model, policy).init(KEY, xs)
  assert bits(variables) == bits(model.init(KEY, xs))
  (carry, ys) = with_policy(model, policy).apply(variables, xs)
  # What is added to a float32 carry is float32, and so is what is returned of it.
  assert (str(carry.dtype), str(ys.dtype)) == ("float32", "float32")
  assert set(operands(with_policy(model, policy).apply, variables, xs)) == {(half, half)}
  np.testing.assert_allclose(ys, model.apply(variables, xs)[1], atol=0.02)
