"""A skipped step of a scaled loss is a deleted one, in each framework, under each transformation.

A piece of the fault campaign: `tests/campaign/frameworks.py` says what run, control and faults are.
"""

import numpy as np
import pytest

from tests.campaign import frameworks
from tests.campaign.frameworks import Case

pytestmark = [
  pytest.mark.standard_promotion("dtypes"),
  # Equinox warns of any function that `functools.wraps` has given an `eqx.filter_checkpoint`.
  pytest.mark.filterwarnings("ignore:\\s*Possibly assigning a JAX-transformed"),
]

CASES = frameworks.generated(np.random.default_rng(0), 17)


def name(case: Case) -> str:
  return ", ".join(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_skipped_step_is_a_deleted_step(case):
  outcome = frameworks.attack(case, 12, np.random.default_rng(0), guard=True)
  assert (outcome.lost, outcome.first) == (0, "")
  assert outcome.injected > 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::4], ids=name)
def test_without_the_guard_every_case_is_lost(case):
  assert frameworks.attack(case, 6, np.random.default_rng(0), guard=False).lost
