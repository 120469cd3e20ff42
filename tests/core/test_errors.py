"""The contract of errors: one class for all, the builtin too, and a text of four parts."""

import copy
import functools
import inspect
import pickle
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict

import mpjax
from mpjax._core.errors import (
  check_call,
  is_library,
  line_of_user,
  listed,
  message,
  nearest,
  shown_file,
)
from tests.errors import check_error

CLASSES = {
  mpjax.MpjaxValueError: ValueError,
  mpjax.MpjaxTypeError: TypeError,
  mpjax.MpjaxRuntimeError: RuntimeError,
  mpjax.UnmatchedRuleError: ValueError,
}
PARTS = {"where": "f(x)", "expected": "a scalar", "got": "shape (3,)", "fix": "Call sum()."}
TEXT = "mpjax.f(x): expected a scalar, got one of shape (3,). Call sum() first."


@pytest.mark.parametrize(("kind", "builtin"), CLASSES.items())
def test_each_error_is_ours_and_the_builtin(kind, builtin):
  assert issubclass(kind, mpjax.MpjaxError)
  assert issubclass(kind, builtin)
  for catch in (mpjax.MpjaxError, builtin):
    with pytest.raises(catch):
      raise kind("f(x)", expected="a", got="b", fix="c")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("again", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_error_keeps_its_parts_and_notes_in_a_copy(kind, again):
  error = kind("f(x)", **{k: v for k, v in PARTS.items() if k != "where"})
  error.add_note("in layer_0")
  same = again(error)
  assert type(same) is kind
  assert str(same) == str(error) == "f(x): expected a scalar, got shape (3,). Call sum()."
  assert vars(same) == {**PARTS, "__notes__": ["in layer_0"]}


@pytest.mark.parametrize("kind", [*CLASSES, mpjax.MpjaxError, mpjax.MpjaxAssertionError])
def test_a_traceback_names_the_class_that_a_user_can_catch(kind):
  error = kind("f(x)", **{k: v for k, v in PARTS.items() if k != "where"})
  text = traceback.format_exception_only(error)[0]
  assert text.startswith(f"mpjax.{kind.__name__}: f(x): expected")
  assert getattr(mpjax, kind.__name__) is kind
  assert type(pickle.loads(pickle.dumps(error))) is kind


def of_text(kind, text):
  """Returns an error of ours with any text, which its class would not make."""
  return kind.__new__(kind, text)


def test_message_holds_the_four_parts_in_order():
  text = message(
    "mpjax.f(x)", expected="a scalar", got="one of shape (3,)", fix="Call sum() first."
  )
  assert text == TEXT


def test_nearest_puts_the_most_alike_first_and_ties_in_alphabetical_order():
  assert nearest("bf61", ["float32", "bf16", "f16"]) == ["bf16", "f16", "float32"]
  assert nearest("x", ["c", "b", "a"], count=2) == ["a", "b"]
  assert nearest("FLOAT32", ["float16", "float32"], count=1) == ["float32"]


def test_check_error_accepts_a_good_error():
  parts = {**PARTS, "fix": "sum()"}
  check_error(of_text(mpjax.MpjaxValueError, TEXT), **parts, builtin=ValueError)


@pytest.mark.parametrize("part", PARTS)
def test_check_error_misses_each_part(part):
  parts = {**PARTS, "fix": "sum()", part: "something else"}
  with pytest.raises(AssertionError):
    check_error(of_text(mpjax.MpjaxValueError, TEXT), **parts)
  with pytest.raises(AssertionError):
    check_error(of_text(mpjax.MpjaxValueError, TEXT), **{**parts, part: ""})


@pytest.mark.parametrize(
  "error",
  [
    ValueError(TEXT),
    of_text(mpjax.MpjaxError, TEXT),
    of_text(mpjax.MpjaxTypeError, TEXT),
    of_text(
      mpjax.MpjaxValueError, "mpjax.f(x): a scalar, got one of shape (3,). Call sum() first."
    ),
    of_text(
      mpjax.MpjaxValueError, "mpjax.f(x): expected a scalar, one of shape (3,). Call sum() first."
    ),
    of_text(mpjax.MpjaxValueError, "mpjax.f(x): expected a scalar, got one of shape (3,)"),
  ],
  ids=["not ours", "no builtin", "other builtin", "no expected", "no got", "no fix"],
)
def test_check_error_refuses(error):
  with pytest.raises(AssertionError):
    check_error(error, **{**PARTS, "fix": "sum()"}, builtin=ValueError)


def test_a_list_of_problems_has_an_end():
  assert listed(["a", "b"]) == "a; b"
  assert listed(list("abc"), most=2) == "a; b; and 1 more"
  text = listed([f"a leaf at {i}" for i in range(1000)])
  assert text.endswith("; a leaf at 19; and 980 more")


@pytest.mark.standard_promotion
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("inside", [False, True])
def test_no_note_advises_to_switch_the_whole_model_off(library, inside):
  def mixed(x):
    return jax.lax.select(x > 0, x.astype(jnp.bfloat16), jnp.zeros(x.shape, jnp.float32))

  if library == "linen":

    class Mixes(nn.Module):
      @nn.compact
      def __call__(self, x):
        return mixed(x)

    model = nn.Sequential([Mixes()]) if inside else Mixes()
    call = functools.partial(mpjax.linen.with_policy(model, "bfloat16").apply, {})
    path = "layers_0"
  else:

    class MixesNnx(nnx.Module):
      def __call__(self, x):
        return mixed(x)

    model = nnx.Sequential(MixesNnx()) if inside else MixesNnx()
    call, path = mpjax.nnx.with_policy(model, "bfloat16"), "layers/0"
  with pytest.raises(TypeError) as excinfo:
    call(jnp.ones(2))
  (note,) = [n for n in excinfo.value.__notes__ if n.startswith("mpjax")]
  assert repr(path if inside else "the root") in note
  assert "cast there" in note
  assert (f"mpjax.Rule(None, path={path!r})" in note) == inside
  assert "**" not in note


LONG = "x" * 30_000


@pytest.mark.parametrize(
  "long", [["got"], ["expected", "fix"], ["where", "expected", "got", "fix"]]
)
def test_a_long_message_is_cut_in_its_longest_parts_only(long):
  parts = {name: LONG if name in long else f"the {name}" for name in PARTS}
  text = message(**parts)
  assert 1500 < len(text) < 2000
  assert all(part in text for name, part in parts.items() if name not in long)
  assert text.count("… 30000 characters …") == len(long)
  assert text.count(": expected ") == text.count(", got ") == 1
  assert text.endswith("x" if "fix" in long else "the fix")


def test_a_message_that_fits_is_left_alone():
  parts = dict.fromkeys(PARTS, "x" * 450)
  assert message(**parts).count("x") == 4 * 450 + 1, "and the one in 'expected'"


def big(leaf=0.0, container=dict, count=500):
  return {"net": container({f"layer_{i:03}": {"kernel": leaf} for i in range(count)})}


@pytest.mark.parametrize("make", ["containers", "missing", "dtypes"])
def test_trees_of_500_leaves_that_differ_make_a_short_message(make):
  new, got = {
    "containers": (big(container=FrozenDict), "FrozenDict for dict at ['net']"),
    "missing": (big(count=1), "nothing at ['net']['layer_001']['kernel']"),
    "dtypes": (big(1), "for float32[] at ['net']['layer_000']['kernel']"),
  }[make]
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.select_tree(True, new, big())
  check_error(
    excinfo,
    where="mpjax.select_tree(finite, new, old)",
    expected="the new tree to be like the old one",
    got=got,
    fix="Give both the same structure, shapes and dtypes: nothing is cast or broadcast here.",
  )
  assert len(str(excinfo.value)) < 2000


def test_a_model_with_a_long_repr_makes_a_short_message():
  model = nn.Sequential([nn.Dense(i + 1) for i in range(500)])
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    mpjax.linen.with_policy(mpjax.linen.with_policy(model, "bfloat16"), "bfloat16")
  assert len(repr(model)) > 30_000
  check_error(
    excinfo,
    where="mpjax.linen.with_policy(model)",
    expected="an unbound flax.linen.Module",
    got="wrapped already (with_policy(Sequential(",
    fix="Wrap the plain model once; of nested policies only the innermost would count.",
  )
  assert len(str(excinfo.value)) < 2000


def test_check_call_keeps_signature_and_documentation():
  @check_call("f(...)", fix="Write f(1).")
  def f(first: int, *, second: int = 2) -> int:
    """Adds."""
    return first + second

  assert f(1) == 3
  assert f.__doc__ == "Adds."
  assert list(inspect.signature(f).parameters) == ["first", "second"]
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    f(1, scond=3)
  check_error(
    excinfo, where="f(...)", expected="arguments first, second", got="'scond'", fix="second=? Write"
  )
  with pytest.raises(TypeError, match="inside"):  # of the function's own, left alone
    check_call("g", fix="")(lambda: (_ for _ in ()).throw(TypeError("inside")))()


@pytest.mark.parametrize(
  "file",
  ["/home/me/mpjax/model.py", "/env/lib/python3.11/site-packages/zoo/net.py", "/srv/jax/train.py"],
)
def test_the_line_of_the_user_is_found_wherever_the_code_is(file):
  """A checkout may be called anything, and a model may be an installed package."""
  names = {"jax": jax}
  exec(compile("def ask(x):\n  return 1 if x else 2\n", file, "exec"), names)
  with pytest.raises(jax.errors.TracerBoolConversionError) as excinfo:
    jax.jit(names["ask"])(1.0)
  assert line_of_user(excinfo.value).startswith(f"{file}:2: ")


CELLS = {
  "/tmp/ipykernel_4242/2194308582.py": "cell",
  "C:\\Users\\me\\AppData\\Local\\Temp\\ipykernel_4242\\2194308582.py": "cell",
  "<ipython-input-12-0a1b2c3d4e5f>": "cell 12",
  "/tmp/ipython-input-2938354417.py": "cell",
  "/tmp/ipython-input-3-4282502808.py": "cell 3",
}
"""The files of cells, as Jupyter, IPython and Colab name them, and what a reader is shown."""


@pytest.mark.parametrize(("file", "shown"), CELLS.items())
def test_the_line_of_a_notebook_is_that_of_its_cell(file, shown):
  names = {}
  exec(compile("def ask(x):\n  return x / 0\n", file, "exec"), names)
  with pytest.raises(ZeroDivisionError) as excinfo:
    names["ask"](1)
  assert line_of_user(excinfo.value).startswith(f"{shown}:2: ")
  assert not is_library(file)


@pytest.mark.parametrize(
  "file",
  ["/home/me/ipykernel_4242/train.py", "/home/me/2194308582.py", "ipykernel_4242.py", "<stdin>"],
)
def test_another_file_has_its_own_name(file):
  assert shown_file(file) == file


def test_every_part_of_mpjax_is_a_library_and_a_users_model_is_not():
  for module in (mpjax, mpjax.linen, mpjax.transforms, jax, functools):
    assert is_library(str(module.__file__))
  assert is_library("/venv/lib/python3.11/site-packages/flax/linen/linear.py")
  assert is_library("<frozen importlib._bootstrap>")
  assert not is_library("/venv/lib/python3.11/site-packages/transformers/models/bert.py")
  assert not is_library("<ipython-input-1>")
  assert not is_library(__file__)
