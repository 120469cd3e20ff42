"""A skipped step leaves no trace: the run equals the one from which its bad steps were deleted.

A piece of the fault campaign: `tests/campaign/by_hand.py` says what run, control and faults are.
`test_every_optimizer.py` has the other optimizers.
"""

import numpy as np
import pytest

from tests.campaign import by_hand

RUNS, STEPS = 21, 12


@pytest.mark.case("I1", "I3", "B005", "B009", "B010", "B111", "B112", "B116", "A39", "A54")
@pytest.mark.parametrize(
  ("name", "dtypes"),
  [("adamw schedule clip", by_hand.DTYPES), ("lamb", ("bfloat16",)), ("adafactor", ("float16",))],
)
def test_a_skipped_step_is_a_deleted_step(name, dtypes):
  rng = np.random.default_rng(0)
  outcomes = by_hand.attack(name, dtypes, RUNS, STEPS, "all", rng)
  assert {outcome.name: outcome.first for outcome in outcomes if outcome.lost} == {}
  assert all(outcome.injected > RUNS * len(dtypes) for outcome in outcomes)
