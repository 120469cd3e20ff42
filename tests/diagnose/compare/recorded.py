"""Runs of `compare` that were not recorded: of modules that return given arrays."""

import numpy as np

from mpjax._diagnose.compare.run import Gradient, Kept, RanCall, RecordedRun

DEEP = "Transformer/encoder/a_module_with_a_long_name"


def run_of(values, name="f", spacing=2.0**-23):
  """Returns a run of modules that return these arrays, each of what the one before returned."""
  arrays, calls = {}, []
  for i, (path, x) in enumerate(values.items()):
    arrays[f"value/{i}"] = arrays[f"cotangent/{i}"] = arrays[f"gradient/{i}"] = np.asarray(x)
    own = (Kept(f"value/{i}", f"cotangent/{i}", np.shape(x), path),)
    calls.append(RanCall(path, "forward", 0, (), i, i, own, calls[-1].outputs if calls else ()))
  gradients = tuple(Gradient(f"gradient/{i}", path, path, 0) for i, path in enumerate(values))
  return RecordedRun(name, tuple(calls), gradients, {}, {}, spacing, "", arrays)


def values(layers=12, at=7, error=1e-3):
  return {
    f"{DEEP}/layers_{i}/{part}": np.ones(4) + error * (i >= at)
    for i in range(layers)
    for part in ("attention/query", "mlp/up_projection_with_a_long_name")
  }
