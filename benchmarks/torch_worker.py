"""The process that runs a model in PyTorch; `gpu_bench.py` starts it and asks.

It needs PyTorch and NumPy alone. Every measurement begins from the same parameters as JAX's, with
a new optimizer; the first two steps are not measured.
"""

import contextlib
import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import draws
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
import torch_models
import workers

NAMES = ("torch float32 highest", "torch TF32", "torch amp")
SCALE = 2.0**15
CHECKED = 5


def synchronize() -> None:
  """Waits for the GPU."""
  if torch.cuda.is_available():
    torch.cuda.synchronize()


class Session:
  """One model and its steps."""

  def hello(self) -> dict[str, Any]:
    """Says which PyTorch this is, and what it runs on."""
    cuda = torch.cuda.is_available()
    return {
      "versions": {"torch": torch.__version__, "torch CUDA": torch.version.cuda or "none"},
      "hardware": torch.cuda.get_device_name(0) if cuda else "CPU",
      "cuda": cuda,
    }

  def load(self, description: Mapping[str, Any], compile: str) -> dict[str, Any]:
    """Builds the model.

    Args:
      description: what `gpu_versions.described` returns.
      compile: "model"; "layers" for each layer of a transformer, and what follows them, which
        takes a tenth of the time for the same kernels; or "none".
    """
    self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    self.half = getattr(torch, description["half"])
    torch.backends.cudnn.benchmark = True
    inputs, labels = draws.batch(**description["batch"])
    self.model = torch_models.model(
      description["kind"], description["fields"], description["batch"]["inputs"]
    )
    torch_models.load(self.model, draws.parameters(description["shapes"]))
    self.model.to(self.device)
    self.images = description["kind"] == "ResNet"
    x = torch.from_numpy(inputs)
    if self.images:
      self.model.to(memory_format=torch.channels_last)
      x = x.permute(0, 3, 1, 2)  # JAX's layout, which PyTorch calls channels_last.
    self.x, self.y = x.to(self.device), torch.from_numpy(labels).long().to(self.device)
    self.first = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
    self.plain = lambda x, y: _cross_entropy(self.model(x), y)
    self.compiled = self._compiled(compile)
    trained = sum(x.numel() for x in self.model.parameters() if x.requires_grad)
    return {"parameters": trained}

  def _compiled(self, how: str) -> Any:
    if how == "none":
      return self.plain
    if how == "layers" and isinstance(self.model, torch_models.Gpt):
      model = self.model
      layers = [torch.compile(layer) for layer in model.layers]
      start = torch.compile(lambda x: model.tokens(x) + model.places)
      end = torch.compile(lambda x, y: _cross_entropy(model.head(model.norm(x)), y))

      def loss(x, y):
        x = start(x)
        for layer in layers:
          x = layer(x)
        return end(x, y)

      return loss
    return torch.compile(self.plain)

  def _begin(self, name: str) -> Any:
    """Resets parameters, and returns a step."""
    exact = name == "torch float32 highest"
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    self.model.load_state_dict(self.first)
    trained = [x for x in self.model.parameters() if x.requires_grad]
    kind = self.device.type
    amp = name == "torch amp"
    # As `training_steps.optimizer`, but for the decay, which optax has at 1e-4 as well.
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler(kind, init_scale=SCALE, enabled=amp)
    loss_fn = self.compiled if amp else self.plain

    def step() -> Any:
      optimizer.zero_grad(set_to_none=True)
      context = torch.autocast(kind, self.half) if amp else contextlib.nullcontext()
      with context:
        loss = loss_fn(self.x, self.y)
      scaler.scale(loss).backward()
      scaler.step(optimizer)
      scaler.update()
      return loss.detach()

    return step

  def _end(self) -> None:
    """Gives memory back that other processes may need."""
    self.model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
      torch.cuda.empty_cache()

  def warm_up(self) -> dict[str, Any]:
    """Compiles: PyTorch does so at the first step."""
    start = time.perf_counter()
    try:
      step = self._begin("torch amp")
      for _ in range(2):
        step()
      synchronize()
      return {"compile_seconds": round(time.perf_counter() - start, 1)}
    finally:
      self._end()

  def check(self, name: str) -> dict[str, Any]:
    """Runs a version: its losses, and about how long a step takes."""
    try:
      step = self._begin(name)
      losses = [float(step()) for _ in range(CHECKED)]
      start = time.perf_counter()
      for _ in range(2):
        step()
      synchronize()
      return {"losses": losses, "seconds": (time.perf_counter() - start) / 2}
    finally:
      self._end()

  def measure(self, name: str, repeats: int) -> dict[str, Any]:
    """Says how long a step takes, of several in a row."""
    try:
      step = self._begin(name)
      # Twice: the first allocates what `_end` gave back, the second the optimizer's leftovers.
      for _ in range(2):
        loss = step()
      synchronize()
      start = time.perf_counter()
      for _ in range(repeats):
        loss = step()
      synchronize()
      seconds = (time.perf_counter() - start) / repeats
      return {"seconds": seconds, "finite": math.isfinite(float(loss))}
    finally:
      self._end()

  def drop(self, name: str) -> dict[str, Any]:
    """Forgets a version that failed: there is nothing that is its own."""
    del name
    self._end()
    return {}


def _cross_entropy(logits: Any, labels: Any) -> Any:
  return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def main(names: Sequence[str] = ("hello", "load", "warm_up", "check", "measure", "drop")) -> None:
  """Answers until the questions end."""
  session = Session()
  workers.serve({name: getattr(session, name) for name in names})


if __name__ == "__main__":
  main()
