"""The guides for those who come from another system: each has a page, and its lines of mpjax run.

The pages themselves are run by test_docs.py.
"""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax

ROOT = pathlib.Path(__file__).parents[2]
OVERVIEW = ROOT / "docs/migrating/features.md"
"""It lists the pages, and has no table of names."""

PAGES = sorted({*ROOT.glob("docs/migrating/*.md")} - {OVERVIEW})

OURS = ("mpjax", "model", "optimizer", "JAX")
"""Headings of columns with lines of ours. The last column of such a table has a link."""


def rows(markdown: str) -> Iterator[dict[str, str]]:
  """Yields the rows of the tables of a page, by the words of the header."""
  header: list[str] = []
  for line in markdown.splitlines():
    cells = [cell.strip() for cell in line.strip("| ").split("|")]
    if not line.startswith("|"):
      header = []
    elif not header:
      header = cells
    elif not set(line) <= set("|-: "):
      yield dict(zip(header, cells, strict=True))


def lines(row: dict[str, str]) -> list[str]:
  """Returns the lines of ours in a row."""
  return [code for column in OURS for code in re.findall(r"`([^`]+)`", row.get(column, ""))]


def names() -> dict[str, Any]:
  """Returns what the lines of the tables may name."""
  # A line that gives back a function has run when it has given it back: nothing is trained here.
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  inner = optax.sgd(0.1, momentum=0.9)
  tx = mpjax.loss_scaling(mpjax.master_weights(inner))
  params = nnx.state(model, nnx.Param)
  state = mpjax.TrainState.create(params, tx)
  return {
    **{"mpjax": mpjax, "jax": jax, "optax": optax, "nnx": nnx},
    **{"inner": inner, "tx": tx, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)},
    **{"model": model, "view": mpjax.with_policy(model, "mixed_float16"), "x": jnp.ones((1, 2))},
    **dict.fromkeys(("params", "grads", "new", "old", "target", "path"), params),
    **{"state": state, "opt_state": state.opt_state, "policy": mpjax.Policy()},
    "norms": mpjax.Rule(mpjax.Policy(), module=nnx.Linear),
    "net": hk.without_apply_rng(hk.transform(jnp.sum)),
    **dict.fromkeys(("fn", "loss_fn"), jnp.sum),
  }


@pytest.mark.filterwarnings("ignore:mpjax.policy_scope")  # The body of a `with` is empty.
@pytest.mark.standard_promotion  # NNX promotes when it makes a layer.
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_lines_of_the_tables_run(page):
  ran = 0
  for row in rows(page.read_text(encoding="utf-8")):
    for code in lines(row):
      exec(f"{code} pass" if code.endswith(":") else code, names())
      ran += 1
    if "page" in row:
      assert "](" in row["page"], row
  assert ran > 3


def test_a_line_that_does_not_run_is_found():
  table = "| a | mpjax | page |\n|---|---|---|\n| `b` | `mpjax.wrong(fn)`, `inner` | [c](d.md) |\n"
  (row,) = rows(table)
  assert lines(row) == ["mpjax.wrong(fn)", "inner"]
  with pytest.raises(AttributeError, match="wrong"):
    exec(lines(row)[0], names())
