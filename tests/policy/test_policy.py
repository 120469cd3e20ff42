"""`Policy`: its strings, its value semantics, its casts."""

import dataclasses
import itertools
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from tests.errors import refused

F32, BF16, F16, F64 = map(np.dtype, ("float32", jnp.bfloat16, "float16", "float64"))
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
HALF = ["bfloat16", "float16"]
PARSE = "mpjax.Policy.parse(policy)"


def dtypes(policy):
  return policy.param_dtype, policy.compute_dtype, policy.output_dtype


# How a policy can be written, and its dtypes of parameters, computation and output.
WRITTEN = {
  ("float32", "full", "f32", "fp32"): (F32, F32, F32),
  ("float64", "f64", "fp64"): (F64, F64, F64),
  ("bfloat16", "params=bfloat16,compute=bfloat16,output=bfloat16"): (BF16, BF16, BF16),
  ("float16", "p=half,c=half,o=half"): (F16, F16, F16),
  ("mixed_float16", "fp16", "half", "f16", "p=f32,c=f16,o=f32"): (F32, F16, F32),
  (
    *("mixed_bfloat16", "bf16", " mixed_bfloat16 ", "p=f32,c=bf16,o=f32", "o=f32,c=bf16"),
    "  p = f32 , c=bf16,o =f32 ",
  ): (F32, BF16, F32),
  # What is left out is float32, and the output as computed.
  ("c=f16", "compute=float16"): (F32, F16, None),
  ("o=bf16",): (F32, F32, BF16),
}


def test_presets_and_other_ways_to_write_them(set_flag):
  set_flag("jax_enable_x64", True)
  for texts, wanted in WRITTEN.items():
    for text in texts:
      policy = mpjax.Policy.parse(text)
      assert dtypes(policy) == wanted, text
      assert policy == mpjax.Policy.parse(texts[0]), text
      assert mpjax.Policy.parse(str(policy)) == policy
      assert (policy.weight_grad_dtype, policy.precision) == (None, None)
  assert mpjax.Policy() == mpjax.Policy.parse("p=f32,c=f32")


def test_parsing_the_text_of_a_policy_gives_it_back():
  for param, compute, output in itertools.product(DTYPES, DTYPES[:3], [None, *DTYPES[:3]]):
    for weight_grad in (None, compute, F32):
      fields = {"param_dtype": param, "compute_dtype": compute, "output_dtype": output}
      policy = mpjax.Policy(**fields, weight_grad_dtype=weight_grad)
      again = mpjax.Policy.parse(str(policy))
      assert again == policy
      assert hash(again) == hash(policy)
      assert again is not policy
  # What jmp prints is read.
  for triple in itertools.product([jnp.float32, jnp.bfloat16, jnp.float16], repeat=3):
    assert dtypes(mpjax.Policy.parse(str(jmp.Policy(*triple)))) == tuple(map(jnp.dtype, triple))


@pytest.mark.parametrize("precision", ["highest", "default", "BF16_BF16_F32"])
def test_the_precision_is_part_of_the_text_and_of_the_value(precision):
  policy = mpjax.Policy(compute_dtype="bfloat16", precision=precision)
  assert str(policy) == f"params=float32,compute=bfloat16,precision={precision}"
  assert mpjax.Policy.parse(str(policy)) == pickle.loads(pickle.dumps(policy)) == policy
  assert mpjax.Policy.parse(f"c=bf16, precision = {precision.lower()}") == policy
  assert policy != mpjax.Policy(compute_dtype="bfloat16")


def test_a_policy_written_otherwise_is_told_how():
  expected = "arguments param_dtype, compute_dtype, output_dtype, weight_grad_dtype"
  near = "Did you mean param_dtype= and compute_dtype=?"
  for given, fields, got, fix in (
    ([], {"param": "f32", "compute": "f16"}, "'param'", near),
    ([], {"compute_type": "f16"}, "'compute_type'", "Did you mean compute_dtype=?"),
    (["bfloat16"], {}, "too many positional arguments", 'parse("mixed_bfloat16")'),
  ):
    with refused(TypeError, "mpjax.Policy(...)", expected, got, fix):
      mpjax.Policy(*given, **fields)


PRESET, ITEMS = (
  "'mixed_int8'; 'bf16', 'fp16' and 'half' are short)",
  "'params=...,compute=...,output=...'",
)


NEAR = {
  **{"mixed_bflota16": "'mixed_bfloat16'", "mixed_f16": "'mixed_float16'", "bf61": "'bfloat16'"},
  **{"MIXED_FLOAT16": "'mixed_float16'", "float61": "'float16'", "mixed": "'mixed_float16'"},
  **{"bf16-true": "mean 'bfloat16'?", "16-true": "mean 'float16'?", "fp8": "mean 'mixed_float8'?"},
  **{"mixed_fp8": "'mixed_float8'", "fp4": "'mixed_nvfp4'?", "mxfp8": "'mixed_mxfp8'?"},
  **{"16-mixed": "mean 'mixed_float16'?", "bf16-mixed": "mean 'mixed_bfloat16'?", "16": "Write"},
  **{"float8_e4m3fn": "mean 'mixed_float8'?", "O2": "mean 'mixed_bfloat16' or 'mixed_float16'"},
  **{"": 'Write "mixed_bfloat16"', "encoder/head": "Write"},
}


def test_nearly_a_preset_and_what_is_no_policy():
  for text, near in NEAR.items():
    with refused(ValueError, PARSE, PRESET, repr(text), near):
      mpjax.Policy.parse(text)
  # A dtype that means low precision is taken for the mixed preset, as in strings.
  for value, preset in [
    *((value, "mixed_bfloat16") for value in (None, 16, ["bfloat16"], jnp.bfloat16)),
    *((value, "mixed_float16") for value in (jnp.float16, np.float16, np.dtype("float16"))),
    *((value, value.__name__) for value in (jnp.float32, jnp.float64)),
  ]:
    with refused(TypeError, PARSE, "a preset", repr(value), f'Pass a string, such as "{preset}"'):
      mpjax.Policy.parse(value)


TWICE, KEY = "compute_dtype is given twice", "key=dtype"


@pytest.mark.parametrize(
  ("text", "where", "expected", "got", "fix"),
  [
    ("p=f32,,c=bf16", PARSE, ITEMS, "'' as item 2 of 'p=f32,,c=bf16'", KEY),
    ("c=bf16,", PARSE, ITEMS, "'' as item 2", "one comma between items"),
    ("p=f32,bf16", PARSE, ITEMS, "'bf16' as item 2", KEY),
    ("c=", PARSE, ITEMS, "'c=' as item 1", KEY),
    ("c=bf16,p=f32,c=f16", PARSE, ITEMS, "'c=f16' as item 3", TWICE),
    ("c=bf16,compute=f16", PARSE, ITEMS, "'compute=f16' as item 2", TWICE),
    ("p=f32,comput=bf16", PARSE, ITEMS, "'comput=bf16' as item 2", "Did you mean 'compute'"),
    ("parms=f32", PARSE, ITEMS, "'parms=f32' as item 1", "Did you mean 'params'"),
    ("=f32", PARSE, ITEMS, "'=f32' as item 1", "Did you mean"),
    # A wrong dtype names the field.
    ("c=bf61", "mpjax.Policy(compute_dtype=", "a floating dtype", "'bf61'", "'bf16'"),
    ("p=f32,o=int32", "mpjax.Policy(output_dtype=", "a floating dtype", "int32", "never cast"),
    ("p=float", "mpjax.Policy(param_dtype=", "a floating dtype", "'float'", "write 'float32'"),
  ],
)
def test_a_malformed_item_is_named_by_its_position(text, where, expected, got, fix):
  with refused(TypeError if "int32" in text else ValueError, where, expected, got, fix):
    mpjax.Policy.parse(text)


@pytest.mark.parametrize("field", ["compute_dtype", "output_dtype", "weight_grad_dtype"])
def test_8_bit_formats_can_only_be_stored(field):
  assert mpjax.Policy(param_dtype="float8_e4m3fn").param_dtype.itemsize == 1
  where, expected = f"mpjax.Policy({field}=...)", "a dtype in which JAX can add"
  with refused(TypeError, where, expected, "float8_e5m2", "for param_dtype only"):
    mpjax.Policy(**{field: "float8_e5m2"})


def test_weight_gradients_in_a_dtype_that_rounds_them(set_flag):
  set_flag("jax_enable_x64", True)
  where, fix = "mpjax.Policy(weight_grad_dtype=...)", "leave it out otherwise"
  expected = "float32 or float64, wider than the compute dtype, or the compute dtype itself"
  for compute, wide in [(F32, BF16), (F32, F16), (BF16, F16), (F16, BF16), (F64, F32)]:
    got = f"{wide.name} with compute_dtype={compute.name}"
    with refused(ValueError, where, expected, got, fix):
      mpjax.Policy(compute_dtype=compute, weight_grad_dtype=wide)
  for compute in (F16, BF16, F32, F64):
    for wide in (compute, F64):
      policy = mpjax.Policy(compute_dtype=compute, weight_grad_dtype=wide)
      assert policy.weight_grad_dtype == wide


def test_float64_parameters_are_multiplied_in_float64(set_flag):
  set_flag("jax_enable_x64", True)
  where, fix = "mpjax.Policy(param_dtype=...)", "Store them in float32"
  expected = "float64 parameters with compute_dtype='float64'"
  for compute in ("float32", "bfloat16", "float16"):
    with refused(ValueError, where, expected, f"float64 with compute_dtype={compute}", fix):
      mpjax.Policy.parse(f"p=f64,c={compute},o=f64")
  assert mpjax.Policy.parse("p=f64,c=f64").compute_dtype == F64


def test_a_policy_is_a_value():
  one = mpjax.Policy(compute_dtype="bf16", output_dtype=jnp.float32)
  two = mpjax.Policy(output_dtype="float32", compute_dtype=np.dtype(jnp.bfloat16))
  assert one == two == mpjax.Policy.parse("mixed_bfloat16")
  assert hash(one) == hash(two)
  assert one != mpjax.Policy(compute_dtype="bf16")
  assert len({one, two, mpjax.Policy()}) == 2
  assert pickle.loads(pickle.dumps(one)) == one
  assert mpjax.Policy.parse(one) is one
  assert dataclasses.replace(one, output_dtype=None) == mpjax.Policy(compute_dtype="bf16")
  with pytest.raises(dataclasses.FrozenInstanceError):
    one.compute_dtype = F16


LEAVES = [
  *(jnp.asarray([1.5, 2.25]), np.asarray([[1.0 / 3.0]], np.float32), jnp.ones((), jnp.float16)),
  *(jnp.asarray(257), np.asarray([257, 1]), jnp.asarray(True), jnp.ones(2, jnp.complex64)),
  *(jax.random.key(0), jax.random.PRNGKey(0), None, (), 0.1, object(), "relu"),
]
TREES = st.recursive(
  st.sampled_from(LEAVES),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
  ),
  max_leaves=8,
)


@pytest.mark.parametrize("method", ["param", "compute", "output"])
@hypothesis.given(tree=TREES, dtype=st.sampled_from(HALF))
@hypothesis.example(tree=LEAVES, dtype="bfloat16")
def test_casts_reach_the_floating_arrays_only(method, tree, dtype):
  before = jax.tree.leaves(tree)
  after = getattr(mpjax.Policy(**{f"{method}_dtype": dtype}), f"cast_to_{method}")(tree)
  assert jax.tree.structure(after) == jax.tree.structure(tree)
  for old, new in zip(before, jax.tree.leaves(after), strict=True):
    if isinstance(old, (jax.Array, np.ndarray)) and jnp.issubdtype(old.dtype, jnp.floating):
      assert isinstance(new, jax.Array)
      assert new.dtype == jnp.dtype(dtype)
      np.testing.assert_array_equal(np.asarray(new), np.asarray(old).astype(dtype))
    else:
      assert new is old


def test_what_has_the_dtype_already_is_the_same_object():
  tree = {"w": jnp.ones(2), "half": jnp.ones((), jnp.float16)}
  assert mpjax.Policy().cast_to_output(tree) is tree
  assert mpjax.Policy().cast_to_param(tree)["w"] is tree["w"]


def test_casts_keep_arrays_where_they_are(devices):
  mesh = jax.sharding.Mesh(np.asarray(devices).reshape(2, 2), ("x", "y"))
  policy = mpjax.Policy(compute_dtype=BF16)
  sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
  sharded = jax.device_put(jnp.ones((4, 4)), sharding)
  committed = jax.device_put(jnp.ones(3), devices[2])
  for cast in (policy.cast_to_compute, jax.jit(policy.cast_to_compute)):
    found = cast(sharded)
    assert found.dtype == BF16
    assert found.sharding.is_equivalent_to(sharding, 2)
    assert cast(committed).devices() == {devices[2]}
