"""A few thousand steps of the soak, and that it notices what it is there for.

`make campaign` runs a million.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import soak

pytestmark = pytest.mark.standard_promotion("dtypes")

UPDATES, SIZE = 2000, 100


@pytest.fixture(scope="module")
def outcome():
  return soak.soak("bfloat16", UPDATES, SIZE)


def failing(half, outcome):
  return [check.name for check in soak.check(half, outcome) if not check.holds]


def test_every_check_holds(outcome):
  assert failing("bfloat16", outcome) == []
  assert failing("float16", soak.soak("float16", UPDATES, SIZE)) == []


def change(field, **values):
  """Returns what changes single steps of a field of the record: `s7=True` that of step 7."""

  def changed(outcome):
    array = np.array(getattr(outcome.record, field))
    for step, value in values.items():
      array[int(step[1:])] = value
    return outcome._replace(record=outcome.record._replace(**{field: array}))

  return changed


def with_state(outcome, **changes):
  return outcome._replace(state=outcome.state._replace(**changes))


SPOILT = {
  "one program": lambda o: o._replace(programs=2),
  "steps + skipped = total": lambda o: with_state(o, step=o.state.step + 1),
  "every fault is skipped": lambda o: o._replace(faults=o.faults._replace(value=o.record.loss)),
  "nothing else is, but for overflow at a high scale": change("finite", s0=False),
  "the scale stays within its limits": change("loss_scale", s5=0.5),
  "scale and counters are those of the oracle": change("loss_scale", s5=2.0**10),
  "200 bad steps in a row change no bit": lambda o: o._replace(stretch=(o.stretch[0], [b""])),
  "resumed from disk it goes on bit for bit": lambda o: o._replace(resumed=(o.resumed[0], [b""])),
  "all numbers are finite": lambda o: with_state(o, model_state=jnp.asarray(jnp.nan)),
  "it has learned": change("loss", **{f"s{UPDATES - 1}": 100.0}),
  "counters stop and do not wrap": lambda o: o._replace(worn=jnp.int32(-1)),
  "memory does not grow": lambda o: o._replace(growth=soak.MEMORY),
}


def test_each_check_can_fail(outcome):
  assert [check.name for check in soak.check("bfloat16", outcome)] == list(SPOILT)
  for name, spoil in SPOILT.items():
    assert name in failing("bfloat16", spoil(outcome)), name
