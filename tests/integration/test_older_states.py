"""States of an older version, which lack the fields that a later one has added.

A copy of the library plays the later version. It differs by the lines that a new counter needs: a
field of the state with a default, and its update.
"""

import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import mpjax

pytestmark = pytest.mark.standard_promotion("dtypes")

ROOT = pathlib.Path(mpjax.__file__).parent.parent

BODY_OF_A_STATE = r"(class \w+State\(NamedTuple\):\n(?:  .*\n|\n)*?)(?=\n\n)"

CHANGES = {
  "_optim/states.py": {
    BODY_OF_A_STATE: r"\1  later: Array = np.int32(0)\n",
    r"\nfrom mpjax._core.types": r"\nimport numpy as np\nfrom mpjax._core.types",
  },
  "_optim/loss_scale.py": {
    r"    total=total,\n": r"    total=total,\n    later=count_up(state.later, applied),\n",
  },
}
"""By file: what a new counter of each state adds. Only that of the loss scale is updated."""

MOMENTS = mpjax.state_dtype(optax.adam(0.1), mu="bfloat16", rounding="stochastic")
INNER = mpjax.accumulate_gradients(mpjax.master_weights(MOMENTS), 2)
TX = mpjax.loss_scaling(mpjax.monitor(INNER))
GRADS = [{"w": jnp.asarray(x)} for x in ([1.0, 2.0], [jnp.inf, 0.0], [0.5, -1.0], [3.0, 0.25])]


def begin():
  params = {"w": jnp.asarray([1.0, -2.0], jnp.bfloat16)}
  return {"params": params, "opt_state": TX.init(params)}


def after(run, grads):
  for each in grads:
    updates, opt_state = TX.update(each, run["opt_state"], run["params"])
    run = {"params": mpjax.apply_updates(run["params"], updates, opt_state), "opt_state": opt_state}
  return run


def begin_nnx():
  model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  return model, nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)


def save(folder):
  """Saves a run in each way that the pages show."""
  run = after(begin(), GRADS[:2])
  (folder / "pickle").write_bytes(pickle.dumps(run))
  (folder / "msgpack").write_bytes(flax.serialization.to_bytes(run))
  np.savez(folder / "arrays.npz", **mpjax.checkpoints.to_arrays(run))
  objects = nnx.state(begin_nnx())
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "orbax", run)
    checkpointer.save(folder / "pure_dict", nnx.to_pure_dict(objects))
    checkpointer.save(folder / "variables", objects)


def check_later_version(folder):
  """Restores the files of `save`; runs where the library has more fields."""
  # 1. Each way gives the same run, which goes on as one that never stopped. It counts from 0.
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(folder / "orbax")
  abstract = jax.eval_shape(begin)
  packed = flax.serialization.msgpack_restore((folder / "msgpack").read_bytes())
  restored = {
    "orbax, its path": mpjax.checkpoints.restore_like(begin(), folder / "orbax"),
    "orbax, a tree": mpjax.checkpoints.restore_like(begin(), tree),
    "orbax, an abstract target": mpjax.checkpoints.restore_like(abstract, folder / "orbax"),
    "msgpack": mpjax.checkpoints.restore_like(begin(), packed),
    "to_arrays": mpjax.checkpoints.restore_like(begin(), np.load(folder / "arrays.npz")),
    "pickle": pickle.loads((folder / "pickle").read_bytes()),
  }
  straight = after(begin(), GRADS)
  for way, run in restored.items():
    assert jax.tree.structure(run) == jax.tree.structure(straight), way
    assert {int(one.later) for one in states_of(run)} == {0}, way
    end = after(run, GRADS[2:])
    for (path, x), y in zip(
      jax.tree_util.tree_leaves_with_path(end), jax.tree.leaves(straight), strict=True
    ):
      is_later = jax.tree_util.keystr(path).endswith(".later")
      assert is_later or np.array_equal(x, y), (way, path)
    (scale,) = end["opt_state"].loss_scale.values()
    assert (int(scale.total), int(scale.skipped), int(scale.later)) == (4, 1, 2), way
  # 2. Functions that read states find the old ones where mappings stand for the classes.
  assert int(mpjax.loss_scaling_metrics(tree)["skipped"]) == 1
  assert int(mpjax.loss_scaling_metrics(packed)["later"]) == 0
  assert mpjax.states.monitor_counts(tree).keys() == {"w"}
  assert mpjax.states.master_params(tree)["w"].dtype == jnp.float32
  # 3. States in variables, and in their pure dict. A member of an ensemble has its own count.
  for objects, name in (
    (nnx.state(begin_nnx()), "variables"),
    (nnx.to_pure_dict(nnx.state(begin_nnx())), "pure_dict"),
  ):
    back = mpjax.checkpoints.restore_like(objects, folder / name)
    assert jax.tree.structure(back) == jax.tree.structure(objects), name
    assert int(mpjax.loss_scaling_metrics(back)["later"]) == 0, name
  several = jax.tree.map(lambda x: jnp.stack([x, x]), packed["opt_state"])
  target = jax.vmap(TX.init)({"w": jnp.ones((2, 2), jnp.bfloat16)})
  (scale,) = mpjax.checkpoints.restore_like(target, several).loss_scale.values()
  assert scale.later.shape == (2,)
  # 4. A field of version 1 has no default: a checkpoint without it is damaged.
  (numbers,) = packed["opt_state"]["loss_scale"].values()
  del numbers["floor_hits"]
  with pytest.raises(mpjax.errors.MpjaxValueError, match=r"nothing at opt_state/.*/floor_hits"):
    mpjax.checkpoints.restore_like(begin(), packed)


def states_of(tree):
  """The states in `tree` that have the later field, the nested ones too."""
  children = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree) if x is not tree]
  found = [state for child in children for state in states_of(child)]
  return [tree, *found] if hasattr(tree, "later") else found


@pytest.mark.slow
def test_a_later_version_restores_a_state_without_its_new_fields(tmp_path):
  save(tmp_path)
  later = tmp_path / "later"
  shutil.copytree(ROOT / "mpjax", later / "mpjax", ignore=shutil.ignore_patterns("__pycache__"))
  shutil.copy(__file__, later / "this_file.py")
  for name, changes in CHANGES.items():
    file = later / "mpjax" / name
    text = file.read_text(encoding="utf-8")
    for pattern, new in changes.items():
      text, count = re.subn(pattern, new, text)
      assert count, pattern
    file.write_text(text, encoding="utf-8")
  code = "import pathlib, sys, this_file; this_file.check_later_version(pathlib.Path(sys.argv[1]))"
  # Without the paths of this version.
  paths = {"PYTHONPATH": str(later), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-P", "-c", code, str(tmp_path)],
    cwd=later,
    env={**os.environ, **paths},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
