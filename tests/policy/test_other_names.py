import pytest

import mpjax
from mpjax._policy.other_names import _REPLACEMENTS, hint


@pytest.mark.parametrize("code", _REPLACEMENTS)
def test_a_replacement_exists(code):
  names = code[code.index("mpjax.") :].split("(")[0].split(".")[1:]
  assert hasattr(mpjax, names[0])


@pytest.mark.parametrize("name", [name for names in _REPLACEMENTS.values() for name in names])
def test_a_name_in_the_table_is_none_of_mpjax(name):
  assert name not in dir(mpjax)
  assert hint(name, []).startswith("write ")


@pytest.mark.parametrize(
  ("name", "code"),
  [
    ("GradScaler", "mpjax.loss_scaling(optimizer)"),
    ("dynamic_scale", "mpjax.loss_scaling(optimizer)"),
    ("unscale_", "jax.value_and_grad(mpjax.scaled(loss_fn, optimizer))"),
    ("half", 'mpjax.with_policy(model, "mixed_float16")'),
    ("cast", 'mpjax.Policy.parse("mixed_bfloat16").cast_to_compute(tree)'),
  ],
)
def test_names_of_other_libraries_are_replaced(name, code):
  assert hint(name, ["autocast", "scaled"]) == f"write {code}"
