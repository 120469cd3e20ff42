"""The contract of errors: one class for all, the builtin too, and a text of four parts; checks."""

import copy
import inspect
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._core import errors
from tests.errors import check_error, refused

CLASSES = {
  mpjax.errors.MpjaxValueError: ValueError,
  mpjax.errors.MpjaxTypeError: TypeError,
  mpjax.errors.MpjaxRuntimeError: RuntimeError,
  mpjax.errors.UnmatchedRuleError: ValueError,
}
PARTS = {"where": "f(x)", "expected": "a scalar", "got": "shape (3,)", "fix": "Call sum()."}
TEXT = "mpjax.f(x): expected a scalar, got one of shape (3,). Call sum() first."


def error_of(kind):
  return kind("f(x)", expected="a scalar", got="shape (3,)", fix="Call sum().")


@pytest.mark.parametrize("kind", [*CLASSES, mpjax.MpjaxError, mpjax.errors.MpjaxAssertionError])
def test_an_error_keeps_its_class_its_parts_and_its_notes_in_a_copy(kind):
  assert {mpjax.MpjaxError, CLASSES.get(kind, Exception)} <= set(kind.__mro__)
  error = error_of(kind)
  error.add_note("in layer_0")
  for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
    assert type(same) is kind
    assert str(same) == str(error) == "f(x): expected a scalar, got shape (3,). Call sum()."
    assert vars(same) == {**PARTS, "__notes__": ["in layer_0"]}
  # A traceback names the class that a user can catch.
  text = traceback.format_exception_only(error)[0]
  home = mpjax if kind is mpjax.MpjaxError else mpjax.errors
  assert text.startswith(f"{home.__name__}.{kind.__name__}: f(x): expected")
  assert getattr(home, kind.__name__) is kind


def of_text(kind, text):
  """Returns an error of ours with any text, which its class would not make."""
  return kind.__new__(kind, text)


def test_nearest_puts_the_most_alike_first_and_ties_in_alphabetical_order():
  assert errors.nearest("bf61", ["float32", "bf16", "f16"]) == ["bf16", "f16", "float32"]
  assert errors.nearest("x", ["c", "b", "a"], count=2) == ["a", "b"]
  assert errors.nearest("FLOAT32", ["float16", "float32"], count=1) == ["float32"]


def test_check_error_accepts_a_good_error_and_misses_each_part():
  parts, kind = {**PARTS, "fix": "sum()"}, mpjax.errors.MpjaxValueError
  check_error(of_text(kind, TEXT), **parts, builtin=ValueError)
  wrong = [
    *((of_text(kind, TEXT), {**parts, part: other}) for part in PARTS for other in ("else", "")),
    *((error, parts) for error in (ValueError(TEXT), of_text(mpjax.MpjaxError, TEXT))),
    (of_text(mpjax.errors.MpjaxTypeError, TEXT), parts),
    *((of_text(kind, TEXT.replace(mark, "")), parts) for mark in ("expected ", ", got", "sum()")),
  ]
  for error, fragments in wrong:
    with pytest.raises(AssertionError):
      check_error(error, **fragments, builtin=ValueError)


def test_a_list_of_problems_has_an_end():
  assert errors.listed(["a", "b"]) == "a; b"
  assert errors.listed(list("abc"), most=2) == "a; b; and 1 more"
  text = errors.listed([f"a leaf at {i}" for i in range(1000)])
  assert text.endswith("; a leaf at 19; and 980 more")


@pytest.mark.parametrize(
  "long", [["got"], ["expected", "fix"], ["where", "expected", "got", "fix"]]
)
def test_a_long_message_is_cut_in_its_longest_parts_only(long):
  parts = {name: "x" * 30_000 if name in long else f"the {name}" for name in PARTS}
  text = errors.message(**parts)
  assert 1500 < len(text) < 2000
  assert all(part in text for name, part in parts.items() if name not in long)
  assert text.count("… 30000 characters …") == len(long)
  assert text.count(": expected ") == text.count(", got ") == 1
  assert text.endswith("x" if "fix" in long else "the fix")
  # One that fits is left alone. The last x is that in "expected".
  assert errors.message(**dict.fromkeys(PARTS, "x" * 450)).count("x") == 4 * 450 + 1


def test_check_call_keeps_signature_and_documentation():
  @errors.check_call("f(...)", fix="Write f(1).")
  def f(first: int, *, second: int = 2) -> int:
    """Adds."""
    return first + second

  assert f(1) == 3
  assert f.__doc__ == "Adds."
  assert list(inspect.signature(f).parameters) == ["first", "second"]
  with refused(TypeError, "f(...)", "arguments first, second", "'scond'", "second=? Write"):
    f(1, scond=3)
  with pytest.raises(TypeError, match="inside"):  # of the function's own, left alone
    errors.check_call("g", fix="")(lambda: (_ for _ in ()).throw(TypeError("inside")))()


CONFIGS = (
  *(mpjax.DynamicLossScale, mpjax.StaticLossScale, mpjax.NoLossScale),
  *(mpjax.Float8, mpjax.MXFP8, mpjax.NVFP4, mpjax.Int8),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_with_an_unknown_field_says_which_there_are(config):
  with refused(TypeError, f"mpjax.{config.__name__}(...)", "arguments", "argument", "Write mpjax."):
    config(nit=1)


KINDS = [
  (None, "None"),
  (True, "True"),
  (1024, "1024"),
  ("dynamic", "'dynamic'"),
  ({}, "a dict"),
  (object(), "an object"),
  (np.ones(2, np.float32), "an array float32[2]"),
  (jnp.ones((), jnp.bfloat16), "an array bfloat16[]"),
  (jax.ShapeDtypeStruct((2, 3), jnp.int32), "a ShapeDtypeStruct int32[2, 3]"),
]


def test_a_value_is_named_by_what_a_reader_knows_of_it():
  assert [errors.kind_of(value) for value, _ in KINDS] == [text for _, text in KINDS]
  traced = []
  jax.eval_shape(lambda x: traced.append(errors.kind_of(x)), 1.0)
  assert traced == ["a traced array float32[]"]


CALL = "mpjax.something(argument)"
WORDS = {"expected": "this", "fix": "Do that."}
CHOICES = {"choices": ("nearest", "stochastic")}
RANGE = "an integer, at least 2 and at most 5"
CHECKS = [
  # A check, its options, what passes, what is of another type, what is not allowed, and the error.
  (errors.check_flag, {}, [True, False], [1, None, "True", np.bool_(True)], [], "a bool", "Pass"),
  (
    *(errors.check_int, {"least": 2, "most": 5, "fix": "Pass 3."}),
    *([2, 5, np.int64(3), np.uint8(4)], [True, 2.0, "2", None, np.ones((), int), jnp.asarray(2)]),
    *([1, 6, -(10**30), np.int64(0)], RANGE, "Pass"),
  ),
  (
    errors.check_int,
    {"least": 2, "fix_type": "Do it.", **WORDS},
    [10**6],
    [2.0],
    [1],
    "this",
    "Do",
  ),
  (
    errors.check_choice,
    CHOICES,
    ["nearest"],
    [],
    ["nearst", None, 3],
    "'nearest' or",
    "mean 'near",
  ),
  (errors.check_callable, WORDS, [len], [3], [], "this", "Do that."),
]


def test_what_is_allowed_passes_and_what_is_not_is_named():
  for check, options, allowed, types, values, expected, fix in CHECKS:
    for value in allowed:
      assert check(value, where=CALL, **options) in (None, value)
    for builtin, written, wrong in ((TypeError, repr, types), (ValueError, str, values)):
      for value in wrong:
        with refused(builtin, CALL, expected, written(value), fix):
          check(value, where=CALL, **options)
  state = {"a": 1}
  assert errors.check_type(state, dict, CALL, **WORDS) is state
  with refused(TypeError, CALL, "this", "a list.", "Do that."):
    errors.check_type([0] * 1000, dict, CALL, **WORDS)
  for x in (1.0, np.float32(1), jnp.ones(()), jax.ShapeDtypeStruct((), "f4")):
    errors.check_scalar(x, CALL, **WORDS)
  with refused(ValueError, CALL, "this", "an array of shape (1, 2)", "Do that."):
    errors.check_scalar(jnp.ones((1, 2)), CALL, **WORDS)
  with pytest.raises(TypeError, match="Tracer"):
    jax.jit(lambda n: errors.check_int(n, CALL, least=0, fix="Do that."))(3)
