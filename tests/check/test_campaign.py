"""The fault campaign would notice if something were lost.

`make campaign` runs all of it; that nothing is lost in a piece of it is tested by
tests/integration/test_train_step_is_atomic.py.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.campaign import frameworks, run
from tests.campaign.frameworks import Case
from tests.campaign.outcome import Outcome, differing, digest, judge, require
from tests.campaign.rig import Sizes


def test_without_the_guards_every_class_is_lost():
  setups = run.SETUPS[0], run.BY_HAND[3]
  outcomes = run.campaign(0, setups, Sizes(4, 12), guard=False)
  assert len(outcomes) == 8
  assert all(outcome.lost for outcome in outcomes)


@pytest.mark.parametrize("field", Case._fields)
def test_each_framework_and_transformation_is_drawn_several_times(field):
  values = {
    "framework": frameworks.FRAMEWORKS,
    "transform": frameworks.TRANSFORMS,
    "scale": frameworks.SCALES,
    "optimizer": frameworks.OPTIMIZERS,
    "policy": frameworks.POLICIES,
  }
  drawn = collections.Counter(getattr(case, field) for case in run.CASES)
  assert set(drawn) == set(values[field])
  assert min(drawn.values()) >= 2


def test_a_fault_is_lost_if_anything_is_wrong_before_the_next_one():
  planted = np.asarray([[0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0]], bool)
  wrong = np.asarray([[0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0]], bool)
  outcome = Outcome("values")
  right = judge(outcome, planted, {"flag": np.zeros_like(wrong), "state": wrong}, "a setup")
  # Two of the first run, and what was wrong in the second before any fault.
  assert (outcome.injected, outcome.lost) == (4, 3)
  assert outcome.first == "a setup, run 0: first wrong after step 2: state"
  assert right.tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 5]
  assert np.all(judge(Outcome(""), planted, {"state": np.zeros_like(wrong)}, ""))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_every_bit_is_compared(dtype):
  tree = {"a": np.ones((3, 2, 2), dtype), "b": np.zeros((3, 1), bool)}
  bits = jax.jit(jax.vmap(lambda tree: digest(tree, ())))
  for element in range(4):
    other = jax.tree.map(np.copy, tree)
    words = other["a"].view(f"uint{8 * other['a'].dtype.itemsize}").reshape(3, 4)
    words[1, element] ^= 1
    assert np.any(bits(other) != bits(tree), axis=1).tolist() == [False, True, False]
    assert differing(other, tree).tolist() == [False, True, False]
  zero, negative = ({"a": jnp.full((1, 2), value)} for value in (0.0, -0.0))
  assert differing(zero, negative).tolist() == [True]


def test_exit_status(monkeypatch, capsys):
  # Of a campaign of one class, and of the self-check, which must lose something.
  def status(outcome, *arguments, broken=False):
    def attack(*args, **options):
      require(not broken, "something else was planted")
      return [outcome]

    monkeypatch.setattr(run.rig, "attack", attack)
    return run.main(arguments, run.SETUPS[:1])

  lost = Outcome("values", 30_000, 1, first="run 3, step 5")
  for outcome, broken, expected in (
    (Outcome("values", 20_000), False, 0),
    (Outcome("values", 19_999), False, 1),
    (lost, False, 1),
    (lost, True, 2),
  ):
    assert status(outcome, broken=broken) == expected
  assert "values: 30,000 injected, 1 lost. run 3, step 5" in capsys.readouterr().out
  assert [status(Outcome("", 1, n), "--self-check") for n in (1, 0)] == [0, 1]
