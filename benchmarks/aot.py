"""Training steps, compiled ahead of time for a chip that is not there, and what is counted of them.

What `gpu_hlo.py` and `tpu_hlo.py` share: the versions of a step, the shapes that it takes, and the
figures of its program.
"""

import collections
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import by_hand
import gpu_steps
import hlo
import jax
import jax.numpy as jnp
import training_steps
from jax.sharding import SingleDeviceSharding
from models import Case

import mpjax

VERSIONS = ("float32", "by hand", "by hand, exact", "policy", "autocast")
"""All take float32 parameters and inputs. `by hand, exact` rounds no more than a policy does: the
gradients of biases are float32 sums, and so are the logits, which the loss reads in float32."""

FLOAT32_LOGITS = "by hand, float32 logits"
"""A version beside `VERSIONS`: `by hand`, with logits that are the float32 sums of their matmul."""


def losses(case: Case, half: str) -> dict[str, Callable[..., Any]]:
  """Returns the loss of the training steps in every one of `VERSIONS`, and as `FLOAT32_LOGITS`."""
  float32, low, policy = (
    functools.partial(training_steps.loss_fn, apply)
    for apply in training_steps.variants(case, half).values()
  )
  exact, logits = (
    by_hand.intercepted(low, how, case.classes) for how in (by_hand.exact, by_hand.float32_logits)
  )
  found = (float32, low, exact, policy, mpjax.autocast(float32, half))
  return {**dict(zip(VERSIONS, found, strict=True)), FLOAT32_LOGITS: logits}


def plain_steps(case: Case, half: str) -> dict[str, tuple[Callable[..., Any], Any]]:
  """Returns the step of each of `losses`, and its state."""
  state = state_of(case)
  return {
    name: (functools.partial(training_steps.step_of, loss), state)
    for name, loss in losses(case, half).items()
  }


def steps(case: Case, half: str) -> dict[str, tuple[Callable[..., Any], Any]]:
  """Returns the step of each of `losses` and of `gpu_steps.BASES`, and its state."""
  return plain_steps(case, half) | gpu_steps.steps(case, half)


def state_of(case: Case) -> Any:
  """Returns shapes of the state of all `VERSIONS`."""
  variables = dict(jax.eval_shape(case.make().init, jax.random.key(0), case.inputs))
  params = variables.pop("params")
  return params, variables, jax.eval_shape(training_steps.optimizer().init, params)


def shallower(case: Case, depth: int | None) -> Case:
  """Returns the case with at most `depth` layers, or blocks in each stage."""
  if depth is None:
    return case
  least: int = depth

  def make(dtype: Any = None) -> Any:
    model = case.make(dtype)
    if hasattr(model, "stages"):
      return model.clone(stages=tuple(min(least, blocks) for blocks in model.stages))
    return model.clone(layers=min(least, model.layers)) if hasattr(model, "layers") else model

  return Case(make=make, inputs=case.inputs, classes=case.classes, outputs=case.outputs)


def arguments_of(case: Case, device: Any, state: Any = None) -> tuple[Any, ...]:
  """Returns shapes of state and batch on the device; without a state that of all `VERSIONS`."""
  state = state_of(case) if state is None else state
  args = (state, case.inputs, jax.ShapeDtypeStruct(case.outputs, jnp.int32))
  return placed(args, SingleDeviceSharding(device))


def placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Returns the shapes of a tree of arrays, with a sharding."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compiled_step(
  step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
  """Returns the figures of a training step, and the text of its program."""
  start = time.perf_counter()
  step = jax.jit(step, donate_argnums=0)
  traced = step.trace(*args)
  compiled = traced.lower().compile(compiler_options=dict(options))
  seconds = time.perf_counter() - start
  text = compiled.as_text() or ""
  program = hlo.parse(text)
  kernels = list(program.kernels())
  audit = mpjax.audit(step)(*args)
  figures = {
    "kernels": len(kernels),
    "bytes": sum(program.moved(each) for each in kernels),
    "temp_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    "products": dict(program.products()),
    "conditionals": program.count("conditional"),
    # A compiler for a CPU makes float32 products of half ones.
    "half_share_traced": audit.half_share,
    "flops": flops_of(audit),
    "product_bytes": sum(program.moved(each) for each in kernels if program.is_product(each)),
    "fusions": program.count("fusion"),
    "accessed_bytes": int((compiled.cost_analysis() or {}).get("bytes accessed", 0)),
    "traffic_bytes": program.traffic(),
    "collectives": program.collectives(),
    "text_bytes": len(text),
    "compile_seconds": round(seconds, 1),
  }
  return figures, text


def compiled_versions(
  versions: Mapping[str, tuple[Callable[..., Any], Any]],
  names: Sequence[str],
  case: Case,
  device: Any,
  options: Mapping[str, Any],
) -> list[tuple[dict[str, Any], hlo.Module]]:
  """Compiles some of the versions that `steps` returns, and returns the figures and HLO of each."""
  compiled = []
  for step, state in (versions[name] for name in names):
    figures, text = compiled_step(step, arguments_of(case, device, state), options)
    compiled.append((figures, hlo.parse(text)))
  return compiled


def flops_of(audit: mpjax.reports.AuditReport) -> dict[str, int]:
  """Returns the FLOPs of matmuls and convolutions by the unit that a GPU computes them with.

  No step here asks for `jax.lax.Precision.HIGHEST`, so Tensor Cores round float32 to TF32.
  """
  found: collections.Counter[str] = collections.Counter()
  for (_, dtype), count in audit.flops.items():
    found["tf32" if dtype == "float32" else dtype] += count
  return dict(found)
