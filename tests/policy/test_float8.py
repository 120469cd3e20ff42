"""`Float8`: its arguments, its text, and the policies that hold one."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import pytest

import mpjax
from mpjax._policy.float8 import Float8, parse_recipe
from tests.errors import refused

WHERE = "mpjax.Policy(matmul=...)"
BFLOAT16 = jnp.dtype("bfloat16")
TEXTS = {
  "float8": Float8(),
  "float8:row": Float8(scaling="row"),
  "float8:power_of_two": Float8(power_of_two=True),
  "float8:weight_grad=half": Float8(weight_grad="half"),
  "float8:weight_grad=bfloat16": Float8(weight_grad="bfloat16"),
  "float8:skip=none": Float8(skip=()),
  "float8:skip=4096x1024|*x16|32x*": Float8(skip=((4096, 1024), (None, 16), (32, None))),
  "float8:row:power_of_two:weight_grad=half:skip=1x2": Float8(
    scaling="row", power_of_two=True, weight_grad="half", skip=((1, 2),)
  ),
}


def test_a_recipe_reads_what_it_writes_and_a_policy_keeps_it():
  policies = set()
  for text, recipe in TEXTS.items():
    assert str(recipe) == text
    assert parse_recipe(text, BFLOAT16, WHERE) == recipe
    assert parse_recipe(recipe, BFLOAT16, WHERE) == recipe
    policy = mpjax.Policy(compute_dtype="bfloat16", matmul=recipe)
    policies.add(policy)
    assert policy == mpjax.Policy(compute_dtype="bfloat16", matmul=text)
    assert mpjax.Policy.parse(str(policy)) == policy
    assert str(policy).endswith(f",matmul={text}")
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
      assert (other, hash(other), repr(other)) == (policy, hash(policy), repr(policy))
    without = dataclasses.replace(policy, matmul=None)
    assert without == mpjax.Policy(compute_dtype="bfloat16") != policy
  assert len(policies) == len(TEXTS)
  preset = mpjax.Policy.parse("mixed_float8")
  assert dataclasses.replace(preset, matmul=None) == mpjax.Policy.parse("mixed_bfloat16") != preset
  # Recipes are frozen, and take keywords only.
  with pytest.raises(dataclasses.FrozenInstanceError):
    Float8().scaling = "row"
  with pytest.raises(TypeError):
    Float8("row")


TENSOR, PAIRS, AS_TEXT = "'tensor' or 'row'", "pairs of sizes", "str(mpjax.Float8(...))"
ARGUMENTS = [
  # The argument, its value, what was expected, what to do, which builtin.
  ("scaling", "rows", TENSOR, "'row'", ValueError),
  ("scaling", 1, TENSOR, "Did you mean", ValueError),
  ("weight_grad", "float32", "'half'", "'float16'", ValueError),
  ("power_of_two", 1, "a bool", "Pass True or False", TypeError),
  *(
    ("skip", value, PAIRS, "skip=()", ValueError)
    for value in (4096, (4096, 1024), ((4096,),), ((True, 1),), ((-1, 1),))
  ),
]
RECIPES = [
  # What is given as `matmul`, what came, what to do, which builtin.
  (8, "8", "mpjax.Float8(...)", TypeError),
  (jnp.float8_e4m3fn, "float8_e4m3fn", "mpjax.Float8(...)", TypeError),
  *(
    (text, repr(text), AS_TEXT, ValueError)
    for text in ("fp8", "float8:rows", "float8:skip=1", "float8:skip=", "")
  ),
]


def test_what_is_no_recipe():
  for name, value, expected, fix, builtin in ARGUMENTS:
    with refused(builtin, f"mpjax.Float8({name}=...)", expected, repr(value), fix):
      Float8(**{name: value})
  for matmul, got, fix, builtin in RECIPES:
    with refused(builtin, WHERE, "a mpjax.Float8, or its text", got, fix):
      mpjax.Policy(compute_dtype="bfloat16", matmul=matmul)


def test_a_recipe_fits_the_compute_dtype():
  recipe = Float8(weight_grad="float16")
  assert mpjax.Policy(compute_dtype="float16", matmul=recipe).matmul == recipe
  got, fix = "weight_grad=float16 with compute_dtype=bfloat16", 'weight_grad="half"'
  with refused(ValueError, WHERE, "'bfloat16'", got, fix):
    mpjax.Policy(compute_dtype="bfloat16", matmul=recipe)
  expected, got = "computes in bfloat16 or float16", "float8 with compute_dtype=float32"
  with refused(ValueError, WHERE, f"a policy that {expected}", got, 'compute_dtype="bfloat16"'):
    mpjax.Policy(matmul="float8")
