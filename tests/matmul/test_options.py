"""The options of formats: their arguments, their texts, and the policies that hold them."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.errors import kind_of
from mpjax._matmul.blocks import MXFP8, NVFP4, BlockRecipe
from mpjax._matmul.float8 import Float8, Float8Recipe
from mpjax._matmul.int8 import Int8, Int8Recipe
from mpjax._matmul.options import Format
from mpjax._matmul.recipes import FORMATS, parse_recipe, recipe_of
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
  "float8:block": Float8(scaling="block"),
  "float8:input_grad=half": Float8(input_grad="half"),
  "mxfp8": MXFP8(),
  "mxfp8:weight_grad=half:skip=8x*": MXFP8(weight_grad="half", skip=((8, None),)),
  "nvfp4": NVFP4(),
  "nvfp4:stochastic_rounding=false:hadamard=false": NVFP4(
    stochastic_rounding=False, hadamard=False
  ),
  "nvfp4:square_weights=false": NVFP4(square_weights=False),
  "nvfp4:seed=3:input_grad=bfloat16": NVFP4(seed=3, input_grad="bfloat16"),
  "int8": Int8(),
  "int8:tensor:input_grad=int8:weight_grad=int8": Int8(
    scaling="tensor", input_grad="int8", weight_grad="int8"
  ),
}
OTHER_TEXTS = {
  "float8:tensor": Float8(),
  "float8:scaling=row:power_of_two=true": Float8(scaling="row", power_of_two=True),
  "float8:skip=none:power_of_two:row": Float8(scaling="row", power_of_two=True, skip=()),
  "nvfp4:hadamard:seed=0": NVFP4(),
  "mxfp8:skip=none": MXFP8(),
}
"""Texts that are read, and written in another way."""


def test_a_format_reads_what_it_writes_and_a_policy_keeps_it():
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
  for text, recipe in OTHER_TEXTS.items():
    assert parse_recipe(text, BFLOAT16, WHERE) == recipe


@pytest.mark.parametrize("format", FORMATS)
def test_a_preset_has_the_defaults_of_its_format(format):
  preset = mpjax.Policy.parse(f"mixed_{format.__name__.lower()}")
  assert preset.matmul == format()
  assert dataclasses.replace(preset, matmul=None) == mpjax.Policy.parse("mixed_bfloat16") != preset


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_public(format):
  assert getattr(mpjax, format.__name__) is format


@pytest.mark.parametrize("format", FORMATS)
def test_formats_are_frozen_and_take_keywords_only(format):
  with pytest.raises(dataclasses.FrozenInstanceError):
    format().skip = ()
  with pytest.raises(TypeError):
    format(())


TENSOR, PAIRS, AS_TEXT = "'tensor' or 'row' or 'block'", "pairs of sizes", "str(mpjax.Float8(...))"
ARGUMENTS = [
  # The format, the argument, its value, what was expected, what to do, which builtin.
  (Float8, "scaling", "rows", TENSOR, "'row'", ValueError),
  (Float8, "scaling", 1, TENSOR, "Did you mean", ValueError),
  (Int8, "scaling", "block", "'row' or 'tensor'", "Did you mean", ValueError),
  (Float8, "weight_grad", "float32", "'half'", "'float16'", ValueError),
  (MXFP8, "input_grad", "float8", "'mxfp8' or 'half'", "'bfloat16'", ValueError),
  (Float8, "power_of_two", 1, "a bool", "Pass True or False", TypeError),
  (NVFP4, "hadamard", None, "a bool", "Pass True or False", TypeError),
  (NVFP4, "seed", -1, "an integer, at least 0", "seed=0", ValueError),
  (NVFP4, "seed", 0.5, "an integer, at least 0", "Pass a Python int", TypeError),
  (MXFP8, "skip", None, PAIRS, "skip=()", ValueError),
  *(
    (Float8, "skip", value, PAIRS, "skip=()", ValueError)
    for value in (4096, (4096, 1024), ((4096,),), ((True, 1),), ((-1, 1),))
  ),
]
RECIPES = [
  # What is given as `matmul`, what came, what to do, which builtin.
  (8, "8", "mpjax.Float8(...)", TypeError),
  (jnp.float8_e4m3fn, "float8_e4m3fn", "mpjax.Float8(...)", TypeError),
  *((text, repr(text), AS_TEXT, ValueError) for text in ("fp8", "float9:row", "")),
]
TEXTS_OF_NONE = {
  # A text, the argument with the error, and what to do.
  "float8:rows": (WHERE, "Did you mean 'row'"),
  "float8:row:scaling=row": (WHERE, "Did you mean"),
  "float8:row:tensor": (WHERE, "Did you mean"),
  "mxfp8:hadamard": (WHERE, "Did you mean"),
  "float8:skip=1": ("mpjax.Float8(skip=...)", "skip=()"),
  "float8:skip=": ("mpjax.Float8(skip=...)", "skip=()"),
  "nvfp4:seed=x": ("mpjax.NVFP4(seed=...)", "Pass a Python int"),
  "nvfp4:hadamard=no": ("mpjax.NVFP4(hadamard=...)", "Pass True or False"),
  "int8:weight_grad=float8": ("mpjax.Int8(weight_grad=...)", "Did you mean"),
}


def test_what_is_no_format():
  for format, name, value, expected, fix, builtin in ARGUMENTS:
    with refused(builtin, f"mpjax.{format.__name__}({name}=...)", expected, repr(value), fix):
      format(**{name: value})
  for matmul, got, fix, builtin in RECIPES:
    with refused(builtin, WHERE, "mpjax.Int8, its text", got, fix):
      mpjax.Policy(compute_dtype="bfloat16", matmul=matmul)


@pytest.mark.parametrize("text", TEXTS_OF_NONE)
def test_an_option_that_a_format_does_not_have(text):
  where, fix = TEXTS_OF_NONE[text]
  with pytest.raises(mpjax.MpjaxError) as error:
    mpjax.Policy(compute_dtype="bfloat16", matmul=text)
  assert error.value.where == where
  assert fix in error.value.fix


def test_gradients_are_in_the_format_unless_an_option_says_half():
  def both(options):
    return [
      recipe_of(options).why_not_gradient(64, of_weight=each) is None for each in (False, True)
    ]

  for options in (Float8(), MXFP8(), NVFP4(), Int8(input_grad="int8", weight_grad="int8")):
    assert both(options) == [True, True]
  assert both(Float8(weight_grad="half")) == [True, False]
  assert both(MXFP8(input_grad="bfloat16")) == [False, True]
  assert both(Int8()) == [False, False]


def test_sizes_that_a_format_does_not_multiply():
  def why_not(options, depth, columns):
    return recipe_of(options).why_not(depth, columns)

  assert why_not(Int8(), 16, 16) is None
  assert why_not(Int8(), 24, 16) == "K=24 is no multiple of 16"
  assert why_not(MXFP8(), 64, 48) == "N=48 is no multiple of 32"
  assert why_not(Float8(), 4096, 1024) == "too small to gain: K=4096, N=1024"
  assert why_not(Float8(scaling="block"), 1024, 8192) == "too small to gain: K=1024, N=8192"
  assert why_not(MXFP8(skip=((64, None),)), 64, 4096) == "too small to gain: K=64, N=4096"
  assert why_not(MXFP8(skip=((64, None),)), 128, 32) is None


@dataclasses.dataclass(frozen=True)
class Own(Format):
  count: int = 3


def test_an_integer_out_of_range_is_told_its_default():
  assert str(Own(count=2**32 - 1)) == "own:count=4294967295"
  for count in (-1, 2**32):
    with refused(ValueError, "Own(count=", "an integer, at least 0", f"{count}", "Write count=3."):
      Own(count=count)


@pytest.mark.parametrize(
  ("recipe", "options", "expected"),
  [
    (Float8Recipe, Int8(), "mpjax.Float8"),
    (Int8Recipe, "int8", "mpjax.Int8"),
    (BlockRecipe, None, "mpjax.Float8 or mpjax.MXFP8"),
  ],
)
def test_a_recipe_refuses_the_options_of_another_format(recipe, options, expected):
  where, got, fix = f"{recipe.__name__}(options)", kind_of(options), f"Write {recipe.__name__}"
  with refused(TypeError, where, f"a {expected}", got, fix):
    recipe(options)


def test_a_recipe_fits_the_compute_dtype():
  recipe = Float8(weight_grad="float16")
  assert mpjax.Policy(compute_dtype="float16", matmul=recipe).matmul == recipe
  got, fix = "weight_grad=float16 with compute_dtype=bfloat16", 'weight_grad="half"'
  with refused(ValueError, WHERE, "'bfloat16'", got, fix):
    mpjax.Policy(compute_dtype="bfloat16", matmul=recipe)
  with refused(ValueError, WHERE, "input_grad='int8', 'half'", "=bfloat16", 'input_grad="half"'):
    mpjax.Policy(compute_dtype="bfloat16", matmul=Int8(input_grad="float16"))
  expected, got = "computes in bfloat16 or float16", "float8 with compute_dtype=float32"
  with refused(ValueError, WHERE, f"a policy that {expected}", got, 'compute_dtype="bfloat16"'):
    mpjax.Policy(matmul="float8")
