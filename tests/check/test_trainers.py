"""The record of `make trainers`, which runs trainers that are not installed here."""

import json
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
RECORDED = FOLDER / "results" / "trainers" / "cpu.json"
TRAINERS = {
  name: one
  for name, one in json.loads(RECORDED.read_text(encoding="utf-8"))["trainers"].items()
  if "not_run" not in one
}
POLICIES = ("mpjax_bfloat16", "mpjax_float16")

each = pytest.mark.parametrize("one", TRAINERS.values(), ids=TRAINERS)


def ran(one, variant):
  """Returns the figures of a variant; skips the test if the trainer has no such variant."""
  figures = one["variants"][variant]
  if "not_run" in figures:
    pytest.skip(figures["not_run"])
  return figures


@each
@pytest.mark.parametrize("variant", POLICIES)
def test_matmuls_run_in_low_precision_and_state_stays_in_float32(one, variant):
  figures, exact = ran(one, variant), ran(one, "float32")
  assert figures["low_share"] >= 0.95
  assert figures["params"] == exact["params"]
  assert not {"bfloat16", "float16"} & figures["opt_state"].keys()


@each
@pytest.mark.parametrize("variant", POLICIES)
def test_losses_are_as_near_to_float32_as_those_of_its_own_bfloat16(one, variant):
  exact, own = ran(one, "float32")["losses"], one["variants"]["own_bfloat16"].get("losses")

  def largest_difference(losses):
    return max(abs(a - b) for a, b in zip(losses, exact, strict=True))

  # A trainer without bfloat16 has no band, so the error is compared with what training changes.
  allowed = 0.05 * (max(exact) - min(exact)) if own is None else largest_difference(own)
  assert largest_difference(ran(one, variant)["losses"]) <= allowed


@each
@pytest.mark.parametrize("variant", POLICIES)
def test_remat_scan_names_and_shardings_stay(one, variant):
  assert ran(one, variant)["counts"] == ran(one, "float32")["counts"]


@each
def test_two_devices_have_the_same_shardings_and_counts(one):
  sharded = one["two_devices"]
  if any("not_run" in figures for figures in sharded.values()):
    pytest.skip("its bfloat16 does not run on two devices")
  own, policy = (sharded[name] for name in ("own_bfloat16", "mpjax_bfloat16"))
  assert policy["shardings"] == own["shardings"]
  assert policy["counts"] == own["counts"]


@each
def test_no_step_is_skipped_at_the_scale(one):
  assert ran(one, "mpjax_float16")["skipped"] in (0, None)


SAVED = {
  # Under a policy softmax is float32, so masked scores, exponentials and the factors of dropout are
  # saved in float32. Its own bfloat16 rounds each of them.
  "lm1b": 1.18,
}
"""The largest ratio of saved bytes for trainers above 1.05, with the reason in a comment."""


@pytest.mark.parametrize("name", TRAINERS)
def test_at_most_a_twentieth_more_is_saved_than_in_its_own_bfloat16(name):
  one = TRAINERS[name]
  saved = [ran(one, v)["saved_bytes"] for v in ("mpjax_bfloat16", "own_bfloat16")]
  assert saved[0] <= saved[1] * SAVED.get(name, 1.05)


def test_the_page_has_the_lines_of_float16_that_were_run():
  page = (FOLDER.parent / "docs" / "trainers.md").read_text(encoding="utf-8")
  for run in sorted((FOLDER / "trainers").glob("*/run.py")):
    marked = [x for x in run.read_text(encoding="utf-8").splitlines() if "  # mpjax" in x]
    lines = [line for line in marked if "mixed_bfloat16" not in line]
    assert len(lines) > 1
    for line in lines:
      # An edit of a trainer's text is a line in quotes.
      code = re.split("[\"'] {2,}", line.partition("  # mpjax")[0])[-1].strip()
      assert code.replace("SCALE", "2.0**15") in page, run.parent.name


def test_the_table_of_the_page_is_that_of_the_record():
  page = (FOLDER.parent / "docs" / "trainers.md").read_text(encoding="utf-8")
  for name, one in TRAINERS.items():
    losses = one["variants"]["mpjax_bfloat16"]["losses"]
    assert re.search(rf"\| {name} \|.*\| {losses[-1]:.4f} \|", page), name
