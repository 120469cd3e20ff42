"""What NumPy says of the numbers that are counted under `jit`."""

import collections

import jax.numpy as jnp
import numpy as np


def exponents(x):
  """Returns how many finite nonzero numbers have which exponent."""
  x = np.asarray(x).astype(np.float64).reshape(-1)
  x = x[np.isfinite(x) & (x != 0)]
  return dict(collections.Counter((np.frexp(x)[1] - 1).tolist()))


def fates(x, name):
  """Returns how many finite nonzero numbers become what in a narrow dtype, by casting them."""
  x = np.asarray(x)
  wide = x.astype(np.float64).reshape(-1)
  kept = np.isfinite(wide) & (wide != 0)
  with np.errstate(all="ignore"):
    narrow = x.reshape(-1)[kept].astype(jnp.dtype(name)).astype(np.float64)
  tiny = float(jnp.finfo(name).smallest_normal)
  return {
    "zero": int(np.sum(narrow == 0)),
    "subnormal": int(np.sum((narrow != 0) & (np.abs(narrow) < tiny))),
    "overflow": int(np.sum(~np.isfinite(narrow))),
  }


def awkward(dtype):
  """Returns numbers of a dtype at and beside all borders, subnormal ones, zeros, inf and NaN."""
  dtype = jnp.dtype(dtype)
  powers = np.ldexp(1.0, np.arange(-1074, 1024, dtype=np.int64))
  borders = [1 + 2.0**-23, 1.5, 1.75, 1.96875, 1 - 2.0**-24, 1.8125, 1.9997]
  exact = np.concatenate([powers, *(b * powers for b in borders)])
  special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 448, 464, 465, 57344, 61440]
  with np.errstate(all="ignore"):
    return np.concatenate([exact, -exact[::3], special]).astype(dtype)
