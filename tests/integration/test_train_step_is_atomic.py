"""A skipped step, also of a loop by hand, is a deleted one: whatever it was that was not finite.

A piece of the fault campaign: `tests/campaign/rig.py` says what run, control and faults are.
"""

import numpy as np
import pytest

from tests.campaign import rig, run

pytestmark = pytest.mark.standard_promotion("dtypes")

SIZES = rig.Sizes(runs=7, steps=24)
SETUPS = [
  run.SETUPS[0]._replace(parts=2),
  *(run.SETUPS[i] for i in (2, 5)),
  run.BY_HAND[2],
]
"""Each dtype to compute in and to store; micro-batches, averages, lanes, clips and a schedule."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_skipped_step_is_a_deleted_step(setup):
  # A fault in any one part skips everything, and the scale is that of the oracle.
  outcomes = rig.attack(setup, SIZES, rig.PLACES, np.random.default_rng(0), guard=True)
  assert {outcome.name: outcome.first for outcome in outcomes if outcome.lost} == {}
  assert all(outcome.injected > 3 * SIZES.runs for outcome in outcomes)
