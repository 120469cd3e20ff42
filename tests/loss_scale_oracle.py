"""The loss scaler once more, in plain Python: what the tests compare the library with."""

import numpy as np

LIMIT = 2**31 - 1
NUMBERS = (
  *("scale", "good_steps", "hysteresis", "total", "skipped", "consecutive_skips", "floor_hits"),
  "bad_updates",
)


def f32(x):
  """Rounds a Python float to float32, without the flush to zero of XLA."""
  with np.errstate(over="ignore"):
    return float(np.float32(x))


class Oracle:
  """One dynamic scaler; `step` takes the truth about a step and moves on."""

  def __init__(
    self,
    *,
    init_scale=2.0**15,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    min_scale=1.0,
    max_scale=2.0**24,
    hysteresis=1,
  ):
    self.factors = f32(growth_factor), f32(backoff_factor)
    self.limits = f32(min_scale), f32(max_scale)
    self.interval, self.allowance = growth_interval, hysteresis
    self.scale = f32(init_scale)
    self.hysteresis = hysteresis
    self.good_steps = self.total = self.skipped = self.consecutive_skips = 0
    self.floor_hits = self.bad_updates = 0

  def step(self, finite, updates_finite=True):
    low, high = self.limits
    self.total += 1
    if finite and updates_finite:
      self.consecutive_skips = 0
    else:
      self.skipped += 1
      self.consecutive_skips += 1
      if finite:
        self.bad_updates += 1
    if finite:
      self.good_steps += 1
      if self.good_steps == self.interval:
        self.good_steps = 0
        self.hysteresis = self.allowance
        self.scale = min(f32(self.scale * self.factors[0]), high)
      return self
    self.good_steps = 0
    if self.hysteresis > 0:
      self.hysteresis -= 1
    if self.hysteresis == 0:
      if self.scale == low:
        self.floor_hits += 1
      self.scale = max(f32(self.scale * self.factors[1]), low)
    return self

  def run(self, flags):
    """Returns the scale and the counters after each step."""
    return [self.step(bool(flag)).numbers() for flag in flags]

  def numbers(self):
    return {name: getattr(self, name) for name in NUMBERS}
