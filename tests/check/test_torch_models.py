"""PyTorch's models are those of JAX: the same losses, step by step, from the same parameters.

Where PyTorch is not installed these are skipped; `make bench` compares losses too, on the GPU.
"""

import json

import jax
import pytest

from tests.scripts import benchmark

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[bench-gpu]'")

pytestmark = [
  pytest.mark.standard_promotion("dtypes"),
  pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

models, gpu_versions, draws = map(benchmark, ("models", "gpu_versions", "draws"))
torch_models, torch_worker = map(benchmark, ("torch_models", "torch_worker"))


@pytest.fixture
def cases(models, gpu_versions, monkeypatch):
  """Models at sizes of which convolutions pad both sides alike, in JAX too."""
  resnet = {"stages": (1, 2), "width": 8, "classes": 10}
  odd = {
    "deep": models._resnet(2, 33, bottleneck=True, large_images=True, **resnet),
    "shallow": models._resnet(2, 17, bottleneck=False, large_images=False, **resnet),
  }
  monkeypatch.setattr(models, "SIZES", {"tiny": {**models.SIZES["tiny"], **odd}})
  monkeypatch.setattr(gpu_versions, "SIZES", models.SIZES)
  return models.SIZES["tiny"]


@pytest.mark.parametrize("model", ["mlp", "gpt", "lstm", "deep", "shallow"])
def test_losses_are_those_of_jax(cases, gpu_versions, draws, torch_worker, model):
  described = json.loads(json.dumps(gpu_versions.described(model, "tiny", "bfloat16")))
  variables = gpu_versions.tree(draws.parameters(described["shapes"]))
  batch = draws.batch(**described["batch"])
  version = gpu_versions.versions(cases[model], "bfloat16")["float32 highest"]
  state, step = version.begin(*variables), jax.jit(version.step)
  wanted = []
  for _ in range(torch_worker.CHECKED):
    state, loss = step(state, *batch)
    wanted.append(float(loss))
  session = torch_worker.Session()
  trained = session.load(described, "none")["parameters"]
  assert trained == sum(x.size for x in jax.tree.leaves(variables[0]))
  got = session.check("torch float32 highest")["losses"]
  assert got == pytest.approx(wanted, rel=2e-5)
  assert wanted[-1] < wanted[0]
  assert session.check("torch TF32")["losses"] == got  # From the same parameters again.
  if model != "lstm":  # PyTorch has no LSTM in bfloat16 on some CPUs.
    assert session.check("torch amp")["losses"] == pytest.approx(wanted, rel=0.01)
    found = session.measure("torch amp", 2)
    assert found["seconds"] > 0
    assert found["finite"]
