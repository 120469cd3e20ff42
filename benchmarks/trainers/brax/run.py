"""Brax: `ppo.train` trains a policy and a value network of Flax Linen with PPO."""

import contextlib
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import observed
import optax
from brax import envs
from brax.training.agents.ppo import losses as ppo_losses
from brax.training.agents.ppo import train as ppo

import mpjax

STEPS, ENVS, UNROLL = 6, 16, 5


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  if variant == observed.OWN:
    raise observed.Skipped("Brax's networks for PPO have no setting of a dtype.")
  scope = contextlib.nullcontext()
  if variant == observed.BFLOAT16:
    scope = mpjax.policy_scope("mixed_bfloat16")  # mpjax
  if variant == observed.FLOAT16:
    scope = mpjax.policy_scope("mixed_float16")  # mpjax
    ppo_losses.compute_ppo_loss = mpjax.scaled(ppo_losses.compute_ppo_loss, 2.0**15)  # mpjax
    adam, skip = optax.adam, mpjax.SkipNonfinite()
    optax.adam = lambda *args, **kwargs: mpjax.loss_scaling(adam(*args, **kwargs), skip)  # mpjax

  losses, states, epochs, minibatches = [], [], [], []
  pmap, compute_loss = jax.pmap, ppo_losses.compute_ppo_loss

  def remembering(fn, **options):
    mapped = pmap(fn, **options)
    if fn.__name__ != "training_epoch":
      return mapped
    epochs.append(observed.Calls(mapped))
    return epochs[0]

  def noted(*args, **kwargs):
    minibatches.append((jax.tree.map(lambda x: (x.shape, x.dtype), args), kwargs))
    return compute_loss(*args, **kwargs)

  with (
    mock.patch.object(jax, "device_put_replicated", _device_put_replicated, create=True),
    mock.patch.object(jax, "pmap", remembering),
    mock.patch.object(ppo_losses, "compute_ppo_loss", noted),
    # The state of the optimizer goes nowhere else.
    mock.patch.object(ppo.pmap, "assert_is_replicated", states.append),
    scope,
  ):
    ppo.train(
      envs.get_environment("fast"),
      num_timesteps=STEPS * ENVS * UNROLL * 2,
      num_evals=STEPS + 1,
      num_envs=ENVS,
      episode_length=32,
      unroll_length=UNROLL,
      batch_size=ENVS,
      num_minibatches=2,
      num_updates_per_batch=2,
      learning_rate=1e-3,
      max_grad_norm=0.5,
      entropy_cost=1e-2,
      reward_scaling=0.1,
      run_evals=False,
      progress_fn=lambda _, metrics: losses.append(float(metrics["training/total_loss"])),
    )

  (state,), (epoch,) = states, epochs
  described, fields = minibatches[-1]
  loss_args = jax.tree.map(lambda x: jnp.zeros(*x), described, is_leaf=_is_description)
  skipped = None
  if variant == observed.FLOAT16:
    one = jax.tree.map(lambda x: x[0], state.optimizer_state)
    skipped = int(mpjax.loss_scaling_metrics(one)["skipped"])
  return observed.Run(
    losses=losses,
    params=state.params,
    opt_state=state.optimizer_state,
    step=epoch.step,
    step_args=epoch.args,
    loss=partial(compute_loss, **fields),
    loss_args=loss_args,
    skipped=skipped,
    context=scope,
  )


def _device_put_replicated(tree, devices):
  """A function that Brax calls, and that JAX 0.12 no longer has."""
  mesh = jax.make_mesh((len(devices),), ("i",), devices=devices)
  sharding = jax.NamedSharding(mesh, jax.P("i"))
  return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices)), sharding), tree)


def _is_description(x):
  return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)


if __name__ == "__main__":
  observed.main(run)
