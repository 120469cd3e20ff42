"""Checkpoints that older code wrote still load, and training goes on from them as it did then."""

import numpy as np
import optax
import pytest

import mpjax
from tests.checkpoints import make
from tests.errors import refused

# Adam divides by a square root and takes powers for its bias correction, where machines may differ
# in the last bit; all else in these files is exact.
INEXACT = {"0.1.0-loss_scaling": "params/"}


def arrays(name, file):
  with np.load(make.FOLDER / name / f"{file}.npz") as opened:
    return dict(opened)


def assert_holds(tree, wanted, inexact=None):
  found = mpjax.checkpoints.to_arrays(tree)
  assert sorted(found) == sorted(wanted)
  for path, x in found.items():
    assert (x.dtype, x.shape) == (wanted[path].dtype, wanted[path].shape)
    if inexact and path.startswith(inexact):
      np.testing.assert_allclose(x, wanted[path], rtol=1e-6, err_msg=path)
    else:
      np.testing.assert_array_equal(x, wanted[path], err_msg=path)


def test_every_layout_has_its_folder():
  assert sorted(path.parent.name for path in make.FOLDER.glob("*/next.npz")) == sorted(make.LAYOUTS)


@pytest.mark.case("A63", "B123", "I5")
@pytest.mark.parametrize("file", ["orbax", "npz"])
@pytest.mark.parametrize("name", make.LAYOUTS)
def test_a_frozen_checkpoint_loads_and_goes_on(name, file):
  layout = make.LAYOUTS[name]
  saved = make.FOLDER / name / "state" if file == "orbax" else arrays(name, "state")
  state = mpjax.checkpoints.restore_like(layout.begin(), saved)
  assert_holds(state, arrays(name, "state"))
  wanted = arrays(name, "next") | averages(arrays(name, "state"), arrays(name, "next"))
  assert_holds(make.run(layout, state, layout.after), wanted, INEXACT.get(name))


def averages(state, after):
  """Returns the averages that belong to `after`: 0.1.0 moved them with each micro-batch."""
  # They move with updates now, of which the steps after the save make one. What is averaged is the
  # master of a parameter, where it has one.
  new = {}
  for path in state:
    if path.startswith("ema/"):
      leaf = path.removeprefix("ema/")
      masters = [x for name, x in after.items() if name.endswith(f"master/{leaf}")]
      reached = (masters or [after[f"params/{leaf}"]])[0]
      new[path] = state[path] + np.float32(0.5) * (reached - state[path])
  return new


def test_they_were_saved_in_the_middle_of_everything():
  for name in make.LAYOUTS:
    state = mpjax.checkpoints.restore_like(make.LAYOUTS[name].begin(), make.FOLDER / name / "state")
    scaling = mpjax.checkpoints.to_arrays(state)
    counts = {path.rpartition("/")[2]: x.item() for path, x in scaling.items() if x.ndim == 0}
    assert (counts["scale"], counts["hysteresis"], counts["skipped"]) == (128, 1, 1)
    assert counts["good_steps"] in (2, 3)
    assert counts.get("micro_batches", 3) == 3


@pytest.mark.case("B123")
def test_an_old_state_moves_to_another_configuration():
  # As the error says: restored as it was, then carried over.
  name = "0.1.0-loss_scaling"
  saved = make.FOLDER / name / "state"
  start = make.begin_adam()
  tx = mpjax.loss_scaling(optax.adam(0.125, b1=0.5, b2=0.75))
  where = "mpjax.checkpoints.restore_like(target, restored)"
  expected = "a loss scale of the configuration 'dynamic' at opt_state"
  got, fix = "'dynamic(growth_interval=4,hysteresis=2)'", "give its inner_state to the new state"
  with refused(ValueError, where, expected, got, fix):
    mpjax.checkpoints.restore_like({**start, "opt_state": tx.init(start["params"])}, saved)
  old = mpjax.checkpoints.restore_like(start, saved)
  scale = float(mpjax.loss_scaling_metrics(old["opt_state"])["loss_scale"])
  new = tx.init(start["params"])._replace(inner_state=old["opt_state"].inner_state)
  new = mpjax.set_loss_scale(new, scale)
  place = "opt_state/inner_state/"
  of_file = {path.partition(place)[2]: x for path, x in arrays(name, "state").items()}
  of_file.pop("")
  assert_holds(new.inner_state, of_file)
  assert mpjax.loss_scaling_metrics(new)["loss_scale"] == 128
