"""The models of `stumbles_linen` and `stumbles_nnx` under a policy, by the same three calls."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from mpjax import linen
from tests.models import stumbles, stumbles_linen, stumbles_nnx
from tests.models.values import shapes
from tests.nnx import rig


class Linen:
  """Models of Linen: plain, and under a policy, as functions of variables and inputs."""

  @staticmethod
  def variables(name, *fields, args, **values):
    return stumbles.valued(shapes(getattr(stumbles_linen, name)(*fields), *args), **values)

  @staticmethod
  def plain(name, *fields):
    return getattr(stumbles_linen, name)(*fields).apply

  @staticmethod
  def under(half, name, *fields, rules=()):
    model = getattr(stumbles_linen, name)(*fields)
    return linen.with_policy(model, f"mixed_{half}", rules).apply


class LinenScope(Linen):
  @staticmethod
  def under(half, name, *fields, rules=()):
    model = getattr(stumbles_linen, name)(*fields)

    def apply(*args):
      with linen.policy_scope(f"mixed_{half}", rules):
        return model.apply(*args)

    return apply


class Nnx:
  """Models of NNX; `variables` are the state of their parameters."""

  @staticmethod
  def split(name, *fields):
    return rig.split(lambda rngs: getattr(stumbles_nnx, name)(*fields, rngs=rngs))

  @staticmethod
  def variables(name, *fields, args, **values):
    state = Nnx.split(name, *fields)[1]
    leaves = jax.tree.leaves(stumbles.valued(nnx.to_pure_dict(state), **values))
    return jax.tree.unflatten(jax.tree.structure(state), leaves)

  @staticmethod
  def plain(name, *fields):
    return Nnx.under(None, name, *fields)

  @staticmethod
  def under(half, name, *fields, rules=()):
    graphdef = Nnx.split(name, *fields)[0]

    def call(state, *args):
      model = nnx.merge(graphdef, state, copy=True)
      return (mpjax.nnx.with_policy(model, f"mixed_{half}", rules) if half else model)(*args)

    return call


def value_and_grads(fun):
  """Returns a function of variables and inputs: output, and gradients of its sum."""

  def loss(variables, *args):
    out = fun(variables, *args)
    return sum(jnp.sum(x) for x in jax.tree.leaves(out)), out

  def both(variables, *args):
    floats = [i for i, x in enumerate(args, 1) if np.issubdtype(x.dtype, np.floating)]
    (_, out), grads = jax.value_and_grad(loss, (0, *floats), has_aux=True)(variables, *args)
    return out, grads

  return both


def leaf(tree, name):
  """Returns the one leaf with a name in its path."""
  paths = jax.tree_util.tree_leaves_with_path(tree)
  (found,) = [x for path, x in paths if name in jax.tree_util.keystr(path)]
  return np.asarray(found)


def assert_close(got, want, bound):
  """Compares each leaf by its norm."""
  ours, true = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(ours) == len(true)
  assert max(stumbles.error(x, y) for x, y in zip(ours, true, strict=True)) < bound
