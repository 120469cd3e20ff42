"""What `mpjax.tune` returns against single modules and greedy choices, all of them measured."""

import functools
import importlib
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs

ROOT, SCALE = pathlib.Path(__file__).parents[2], 1024.0


class Choices:
  """Measures the gradient of a loss with some modules in float32."""

  def __init__(self, loss_fn, policy, args, paths):
    self.loss_fn, self.policy, self.args, self.paths = loss_fn, policy, args, paths
    self.wanted = self.gradient(loss_fn)

  def gradient(self, loss_fn):
    scaled = jax.grad(lambda *args: SCALE * loss_fn(*args))
    found = jax.tree.leaves(jax.jit(scaled)(*self.args))
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in found])

  @functools.cache  # noqa: B019
  def measure(self, chosen):
    """Returns the relative error of the gradient, and the share of FLOPs in float32."""
    rules = [
      mpjax.Rule("float32" if path in chosen else self.policy, path=f"**/{path}")
      for path in self.paths
    ]
    cast = mpjax.autocast(self.loss_fn, self.policy, rules=rules)
    share = 1 - programs.half_share(jax.make_jaxpr(jax.grad(cast))(*self.args))
    error = np.linalg.norm(self.gradient(cast) - self.wanted) / np.linalg.norm(self.wanted)
    return (float(error) if math.isfinite(error) else math.inf), share

  def single(self, tolerance):
    """Returns the least share of one module that is enough; 1 if none is."""
    found = [self.measure(frozenset({path})) for path in self.paths]
    return min((share for error, share in found if error <= tolerance), default=1.0)

  def greedy(self, tolerance):
    """Returns the share when the module that helps most is added until the error is allowed."""
    chosen = frozenset()
    while self.measure(chosen)[0] > tolerance and len(chosen) < len(self.paths):
      # Of those that help equally, as while the gradient is not finite, what costs least.
      chosen = min((chosen | {p} for p in self.paths if p not in chosen), key=self.measure)
    error, share = self.measure(chosen)
    return share if error <= tolerance else 1.0


@pytest.mark.convergence  # It measures a hundred choices.
@pytest.mark.parametrize(
  ("policy", "tolerance"),
  [("mixed_float16", 8e-4), ("mixed_bfloat16", 6e-3)],
)
def test_no_single_module_and_no_greedy_choice_of_a_transformer_is_cheaper(
  policy, tolerance, monkeypatch
):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  example = importlib.import_module("tune_transformer")
  model = example.Transformer()
  ids = jax.random.randint(jax.random.key(0), (8, 17), 0, example.VOCABULARY)
  params = jax.jit(model.init)(jax.random.key(1), ids)

  def loss_fn(params, ids):
    logits = jax.nn.log_softmax(model.apply(params, ids[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1))

  report = mpjax.tune(loss_fn, policy, tolerance=tolerance)(params, ids)
  assert len(report.evaluations) <= report.bound
  paths = tuple(module.path for module in report.modules)
  choices = Choices(loss_fn, policy, (params, ids), paths)
  cast = mpjax.autocast(loss_fn, policy, rules=report.rules)
  error = np.linalg.norm(choices.gradient(cast) - choices.wanted) / np.linalg.norm(choices.wanted)
  assert error <= 1.05 * tolerance  # Measured at another loss scale.
  share = 1 - report.half_share
  assert share <= choices.single(tolerance) + 1e-9
  assert share <= choices.greedy(tolerance) + 1e-9
