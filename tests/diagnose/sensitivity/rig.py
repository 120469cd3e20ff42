"""The errors of functions whose roundings are written in their code."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnose.call import Call
from mpjax._diagnose.sensitivity.errors import errors_of
from tests.models.values import normal

MANY = 4096
"""Projections, with which a contribution is known within 2 %."""


def errors(fn, *args, **options):
  program, outputs, *_ = Call(args, {}).traced(fn)
  operands = [*map(jnp.asarray, jax.tree.leaves(args))]
  return errors_of(program, operands, dict.fromkeys(range(len(outputs))), **options)


def low(x, dtype=jnp.bfloat16):
  return x.astype(dtype)


def rounded(x, dtype=jnp.bfloat16):
  return np.asarray(np.asarray(x).astype(dtype).astype(np.float64))


X = np.asarray(normal(16), np.float32)
