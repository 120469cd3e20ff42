"""The figures of the pages: drawn from facts, there in both themes, and what their scripts draw."""

import json
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from docs.figures import formats, memory, style, underflow
from docs.figures.__main__ import FIGURES

DRAWN_BY = "3.11."
"""The version of matplotlib that drew the files: another one writes other bytes."""


FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", FIGURES)
def test_a_file_is_what_its_script_draws(name, tmp_path):
  # In the light theme; in the dark one it is the same but for the colors.
  light, dark = style.files(name)
  words = [e.text for e in ET.parse(light).iter("{http://www.w3.org/2000/svg}text")]
  assert len(words) > 8
  assert all(words)
  text = light.read_text(encoding="utf-8")
  assert f'width="{style.WIDTH * style.POINTS:g}pt"' in text
  one, other = ([x.text, x.faint, x.rule, x.on_lines] for x in style.THEMES)
  for area in ("fills", "lines"):
    one += getattr(style.LIGHT, area).values()
    other += [getattr(style.DARK, area)[kind] for kind in getattr(style.LIGHT, area)]
  colors = dict(zip(one, other, strict=True))
  recolored = re.sub(r"#[0-9a-f]{6}\b", lambda color: colors[color[0]], text)
  assert recolored == dark.read_text(encoding="utf-8") != text
  if not mpl.__version__.startswith(DRAWN_BY):
    pytest.skip(f"the files were drawn by matplotlib {DRAWN_BY}*, and this is {mpl.__version__}")
  style.svg(FIGURES[name].draw, style.LIGHT, tmp_path / light.name)
  again = (tmp_path / light.name).read_text(encoding="utf-8")
  assert again == text, f"run: python -m docs.figures {name}"


def test_formats_are_those_of_all_their_numbers():
  found = {each.name: each for each in formats.facts()}
  for name in FORMATS:
    dtype = jnp.dtype(name)
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}")
    with np.errstate(invalid="ignore"):
      numbers = bits.view(dtype).astype(np.float64)
    finite = np.sort(numbers[np.isfinite(numbers) & (numbers > 0)])
    each = found[name]
    assert (finite[0], finite[-1]) == (2.0**each.least, each.largest)
    assert ((finite >= 1) & (finite < 2)).sum() == 2**each.mantissa
    assert 1 + each.exponent + each.mantissa == 8 * dtype.itemsize
    # Below it the spacing does not shrink any more.
    assert np.diff(finite[finite <= 2.0 ** (each.normal + 1)]).max() == finite[0]
  assert found["float32"].largest == np.finfo(np.float32).max
  assert found["TF32"].exponent == 8
  assert found["TF32"].mantissa == 10


def test_shares_are_what_a_cast_to_float16_does():
  exponents = range(-40, 20)
  numbers = 1.3 * 2.0 ** np.arange(-40, 20)
  with np.errstate(over="ignore", under="ignore"):
    cast = numbers.astype(np.float16)
  subnormal = (cast != 0) & (numbers < np.finfo(np.float16).tiny)
  found = underflow.shares(dict.fromkeys(exponents, 3))
  # 1.3 times 2**-25 is rounded up, to the smallest subnormal number.
  assert found == pytest.approx(((cast == 0).mean(), subnormal.mean(), np.isinf(cast).mean()))


def test_the_recorded_gradients_are_those_that_the_page_speaks_of():
  found = underflow.facts()
  exponents = {int(e): n for e, n in found["exponents"].items()}
  moved = int(np.log2(found["loss_scale"]))
  assert 2.0**moved == found["loss_scale"]
  before = underflow.shares(exponents)
  after = underflow.shares({e + moved: n for e, n in exponents.items()})
  assert before.zero > 0.01
  assert before.subnormal > 0.5
  assert after.zero + after.subnormal + after.overflow < 1e-3


@pytest.mark.standard_promotion
def test_the_recorded_bytes_are_those_of_the_model():
  found, layers = memory.facts(), memory.LAYERS
  full = [memory.shapes(memory.Transformer(n)) for n in (1, 2)]
  sizes = [sum(x.size for x in jax.tree.leaves(each)) for each in full]

  def of_all(one, two):
    """Each layer adds the same number of bytes."""
    return {key: layers * two[key] - two[key] - (layers - 2) * one[key] for key in one}

  assert {"": found["parameters"]} == of_all(*({"": size} for size in sizes))
  for name, (_, params, moments, masters) in memory.WAYS.items():
    one, two = (memory.stored(each, params, moments, masters) for each in full)
    recorded = found["ways"][name]
    assert {kind: recorded[kind] for kind in one} == {
      kind: of_all(one[kind], two[kind]) for kind in one
    }
  policy, params, *_ = memory.WAYS[name]
  one, two = (memory.backward(n, policy, params) for n in (1, 2))
  assert recorded["gradients"] == of_all(one["gradients"], two["gradients"])
  assert recorded["kept"] == of_all(one["kept"], two["kept"])


@pytest.mark.convergence
@pytest.mark.standard_promotion
def test_the_recorded_facts_are_measured_again():
  assert json.loads(json.dumps(memory.measure())) == memory.facts()
  found, recorded = underflow.measure(), underflow.facts()
  shares = [
    underflow.shares({int(e): n for e, n in each["exponents"].items()})
    for each in (found, recorded)
  ]
  assert shares[0] == pytest.approx(shares[1], abs=0.02)
