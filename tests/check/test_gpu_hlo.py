"""Counting what a compiled program would run, and the script that compiles for a GPU."""

import collections
import functools
import io
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from rich.console import Console

import mpjax
from mpjax._diagnose.call import compiled_as_written
from tests import programs
from tests.scripts import BENCHMARKS, benchmark

pytestmark = pytest.mark.standard_promotion("dtypes")

# As XLA writes it for a GPU, shortened. A convolution of cuDNN with its workspace, one of whose
# operands was copied before; a product within a fusion, whose operand is given twice; bytes of a
# tuple; names for bytes that are there.
TEXT = (pathlib.Path(__file__).parent / "kernels.hlo").read_text(encoding="utf-8")

hlo, gpu_hlo, tpu_hlo = benchmark("hlo"), benchmark("gpu_hlo"), benchmark("tpu_hlo")
gpu_ratios = benchmark("gpu_ratios")


def test_kernels_move_their_operands_and_results(hlo):
  program = hlo.parse(TEXT)
  moved = {each.name: program.moved(each) for each in program.kernels()}
  assert moved == {
    "w.copy": 2 * 48,
    "conv": 32 + 48 + 12 + 10,
    "sort": 32 + 4,
    "start": 32 + 64,
    # What is given twice is read once.
    "fusion.1": 32 + 64 + 16 + 32 + 5,
  }
  # Products are found in fusions and among calls; one of two dtypes names both.
  assert sum(map(program.is_product, program.kernels())) == 2
  assert program.products() == {"f16": 1, "bf16": 1}
  assert (program.count("convert"), program.count("custom-call"), program.count("dot")) == (2, 2, 1)
  mixed = TEXT.replace("dot(%p0, %narrow)", "dot(%p0, %p1)")
  assert hlo.parse(mixed).products() == {"f16": 1, "bf16 x f32": 1}
  # The number of a layer is left out, and what XLA made up goes by its own name.
  found = hlo.by_source(program)
  assert found["jit(f)/jvp(M)/Layer/conv"] == (1, 102)
  assert found["jit(f)/jvp(M)/Layer/dot_general"] == (1, 149)
  assert found["(copy)"] == (1, 96)
  assert sum(kernels for kernels, _ in found.values()) == 5
  with pytest.raises(ValueError, match="no entry computation"):
    hlo.parse("HloModule empty\n")
  # Whatever XLA makes of it here: one product, whose operands and result are 64 bytes each.
  compiled = jax.jit(lambda x, y: x @ y).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile()
  program = hlo.parse(compiled.as_text())
  assert program.products() == {"f32": 1}
  assert sum(map(program.moved, program.kernels())) == 3 * 64


def test_an_estimate_is_the_longer_of_arithmetic_and_memory(gpu_hlo):
  # Of an H200: 989 and 495 trillion operations, and 4.8 trillion bytes, in a second.
  seconds = gpu_hlo.roofline.seconds
  assert seconds("h200", {"bfloat16": 989 * 10**12}, 10**9, 4800 * 10**9) == 2
  assert seconds("h200", {"tf32": 495 * 10**12, "float8_e4m3fn": 1979 * 10**12}, 1, 0) == 2
  assert seconds("h200", {"bfloat16": 1}, 9600 * 10**9, 0) == 2
  # No Tensor Core of a V100 takes bfloat16 or float32.
  assert seconds("v100", {"bfloat16": 157 * 10**11}, 1, 0) == 1
  assert seconds("v100", {"tf32": 157 * 10**11}, 1, 0) == 1
  assert seconds("b200", {"float4_e2m1fn": 9 * 10**15, "float8_e4m3fn": 4500 * 10**12}, 1, 0) == 2
  assert seconds("mi300", {}, 1, 1) is None


def test_every_target_is_a_chip_with_a_roofline(gpu_hlo):
  roofline = gpu_hlo.roofline
  assert gpu_hlo.GPUS.keys() == roofline.PEAKS.keys()
  # In GB per second, of NVIDIA's data sheets.
  sheets = {"v100": 900, "a100": 2039, "h100": 3350, "h200": 4800, "b200": 8000}
  for name, file in gpu_hlo.GPUS.items():
    assert roofline.bandwidth(name) == pytest.approx(1e9 * sheets[name], rel=3e-3)
    lines = file.read_text(encoding="utf-8").splitlines()
    keys = collections.Counter(line.split(":")[0].strip() for line in lines if ":" in line)
    assert keys["core_count"] == keys["memory_bandwidth"] == keys["device_memory_size"] == 1
    assert any(f'"NVIDIA {file.stem.upper()}"' in line for line in lines)


def test_one_version_differs_from_another_by_its_dtypes_alone(gpu_hlo):
  # All are steps of the same float32 state and inputs, and return what they are given.
  case, device = gpu_hlo.SIZES["tiny"]["mlp"], jax.devices()[0]

  def shapes(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

  args = gpu_hlo.aot.arguments_of(case, device)
  assert {x.dtype for x in jax.tree.leaves(args) if x.dtype != jnp.int32} == {jnp.dtype("float32")}
  found, bases = gpu_hlo.aot.steps(case, "float16"), gpu_hlo.gpu_steps.BASES
  assert tuple(found) == (*gpu_hlo.aot.VERSIONS, gpu_hlo.aot.FLOAT32_LOGITS, *bases)
  assert set(bases.values()) < set(found)
  shares = {}
  for name, (step, state) in found.items():
    args = gpu_hlo.aot.arguments_of(case, device, state)
    traced, (new, loss) = jax.make_jaxpr(step, return_shape=True)(*args)
    assert shapes(new) == shapes(state)
    assert name not in gpu_hlo.aot.VERSIONS or shapes(loss) == [((), jnp.float32)]
    shares[name] = programs.half_share(traced)
  assert shares.pop("float32") == 0
  assert set(shares.values()) == {1}


@pytest.mark.parametrize(("model", "left"), [("mlp", 0), ("gpt", 1)])
def test_exact_by_hand_sums_the_gradients_of_biases_in_float32(gpu_hlo, model, left):
  # What is left of the GPT's is the table of places, which the model itself broadcasts in half.
  case = gpu_hlo.SIZES["tiny"][model]
  args = gpu_hlo.aot.arguments_of(case, jax.devices()[0])
  in_half = {}
  for name in ("by hand", "by hand, exact"):
    loss = gpu_hlo.aot.losses(case, "bfloat16")[name]
    step = functools.partial(gpu_hlo.aot.training_steps.step_of, loss)
    found = [eqn for eqn, _ in programs.equations(jax.make_jaxpr(step)(*args))]
    sums = [eqn.invars[0].aval.dtype for eqn in found if eqn.primitive.name == "reduce_sum"]
    in_half[name] = sums.count(jnp.dtype("bfloat16"))
  assert in_half["by hand"] > in_half["by hand, exact"] == left


def test_programs_without_mpjax_are_compiled_once(gpu_hlo, tmp_path, monkeypatch):
  by_hand, base = tmp_path / "by_hand.json", gpu_hlo.aot.FLOAT32_LOGITS
  compiled, compile_step = [], gpu_hlo.aot.compiled_step

  def counted(*args):
    compiled.append(args)
    return compile_step(*args)

  monkeypatch.setattr(gpu_hlo.aot, "compiled_step", counted)
  for programs_compiled in (2, 3):
    text = io.StringIO()
    results = gpu_hlo.main(
      models=["mlp"], gpu=None, size="tiny", versions=[base, "policy"], by_hand=by_hand,
      out=tmp_path / "figures.json", console=Console(file=text, width=80),
    )  # fmt: skip
    assert len(compiled) == programs_compiled
    found = results["models"]["mlp"]["versions"]
    ratio = found["policy"]["temp_bytes"] / found[base]["temp_bytes"]
    assert f"{ratio:.3f}" in text.getvalue().split("mlp, policy")[1]


def test_programs_of_this_cpu_are_compared_and_written(gpu_hlo, tmp_path):
  text = io.StringIO()
  out = tmp_path / "new" / "figures.json"
  results = gpu_hlo.main(
    models=["mlp"], gpu=None, size="tiny", half="float16", differences=3,
    texts=tmp_path / "texts", out=out, console=Console(file=text, width=80),
  )  # fmt: skip
  assert json.loads(out.read_text()) == results
  versions = results["models"]["mlp"]["versions"]
  assert tuple(versions) == gpu_hlo.aot.VERSIONS
  for name, one in versions.items():
    # Two dense layers, and no gradient for the first input.
    assert sum(one["products"].values()) == 5
    assert one["half_share_traced"] == (name != "float32")
    assert min(one["kernels"], one["bytes"], one["temp_bytes"]) > 0
  by_hand = gpu_hlo.hlo.parse((tmp_path / "texts" / "mlp_by_hand_exact.txt").read_text())
  assert len(list(by_hand.kernels())) == versions["by hand, exact"]["kernels"]
  assert f"{versions['float32']['kernels'] / versions['by hand']['kernels']:.3f}" in text.getvalue()


def test_without_a_compiler_it_says_what_to_install(gpu_hlo, tpu_hlo, monkeypatch):
  def missing(**given):
    raise ValueError(f"Backend '{given['platform']}' is not in the list of known backends")

  monkeypatch.setattr(gpu_hlo.topologies, "get_topology_desc", missing)
  for call, name, *parts in (
    (gpu_hlo.gpu_device, "h200", "jax-cuda12-plugin", "make gpu-hlo", "--gpu none"),
    (tpu_hlo.devices, "v5e:2x2", "jax[tpu]", "make tpu-hlo"),
  ):
    with pytest.raises(RuntimeError) as caught:
      call(name)
    assert all(part in str(caught.value) for part in (name, jax.__version__, *parts))


def versions(gpu_hlo, device, case, half, *names):
  """Returns the figures and HLO of versions of `aot.steps`, and of "policy, w=half"."""
  # In float16 the weight gradients of matmuls are float32 under a policy, and in half by hand.
  policy = f"params=float32,compute={half},output=float32,weight_grad={half}"
  apply = mpjax.with_policy(case.make(), policy).apply
  step = functools.partial(gpu_hlo.aot.training_steps.plain_step, apply)
  found = gpu_hlo.aot.steps(case, half) | {"policy, w=half": (step, gpu_hlo.aot.state_of(case))}
  return gpu_hlo.aot.compiled_versions(found, names, case, device, gpu_hlo.OPTIONS)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", ["mlp", "resnet", "gpt", "lstm"])
def test_a_policy_is_by_hand_on_an_h200(gpu_hlo, h200, model, half):
  # With exact sums by hand: the same kernels and memory, and not one sum in half.
  case = gpu_hlo.aot.shallower(gpu_hlo.SIZES["cpu"][model], 1)
  names = "by hand, exact", "policy, w=half"
  (by_hand, _), (policy, program) = versions(gpu_hlo, h200, case, half, *names)
  short = {"float16": "f16", "bfloat16": "bf16"}[half]
  assert (policy["products"].keys(), policy["conditionals"]) == ({short}, 0)
  if model == "lstm":
    # The gates are held in float32 for the sum that the state is: XLA takes one matmul of the input
    # and the state apart for that. By hand their biases add up in low precision, too.
    assert policy["kernels"] - by_hand["kernels"] <= 6
    assert policy["bytes"] <= 1.25 * by_hand["bytes"]
    assert policy["temp_bytes"] <= 1.1 * by_hand["temp_bytes"]
  else:
    assert policy["products"] == by_hand["products"]
    assert policy["kernels"] <= by_hand["kernels"]
    # The gradients of a norm's input are added in float32, by hand in low precision.
    assert policy["bytes"] <= 1.01 * by_hand["bytes"]
    assert policy["temp_bytes"] <= 1.02 * by_hand["temp_bytes"]
  parts = program.computations.values()
  sums = [x for each in parts for x in each.values() if x.opcode == "reduce"]
  assert sums
  assert not [x.source for x in sums if gpu_hlo.hlo.dtype(x.type) == short]


WEIGHT_GRADS = {
  "mlp": (0, 1.02),
  "resnet": (0, 1.001),
  "gpt": (0, 1.01),
  "lstm": (7, 1.05),
}
"""Upper bounds of what float32 weight gradients cost under a float16 policy: additional kernels,
and the ratio of bytes."""


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("model", WEIGHT_GRADS)
def test_float32_weight_gradients_of_float16_cost_few_bytes_on_an_h200(gpu_hlo, h200, model):
  case = gpu_hlo.aot.shallower(gpu_hlo.SIZES["cpu"][model], 1)
  names = "policy, w=half", "policy"
  (low, _), (policy, _) = versions(gpu_hlo, h200, case, "float16", *names)
  kernels, ratio = WEIGHT_GRADS[model]
  assert policy["products"] == low["products"]
  assert policy["kernels"] <= low["kernels"] + kernels
  assert policy["bytes"] <= ratio * low["bytes"]


QUICK = {
  "pre-norm": (1.00, 0.93),
  "post-norm": (1.01, 0.93),
  "own post-norm": (1.06, 0.96),
  "positions": (1.03, 0.97),
  "scan": (0.93, 0.83),
  "scan and remat": (1.03, 1.00),
  "convolutions": (1.01, 1.02),
}
"""Upper bounds of bytes and temporaries under a policy, as ratios to dtypes by hand with the same
float32 logits."""


@pytest.mark.gpu_compiler
@pytest.mark.standard_promotion  # Custom norms multiply `y * scale`.
@pytest.mark.parametrize("model", QUICK)
def test_bytes_and_temporaries_of_a_policy_on_an_h200(gpu_hlo, h200, model):
  case, names = gpu_hlo.SIZES["quick"][model], (gpu_hlo.aot.FLOAT32_LOGITS, "policy")
  (by_hand, _), (policy, _) = versions(gpu_hlo, h200, case, "bfloat16", *names)
  most_bytes, most_temporaries = QUICK[model]
  assert policy["traffic_bytes"] <= most_bytes * by_hand["traffic_bytes"]
  assert policy["temp_bytes"] <= most_temporaries * by_hand["temp_bytes"]


LAYERS, WIDTH = 12, 64


def small_step(tx, half, params, state, x):
  def loss(params):
    y = x
    for kernel, bias in params:
      y = jnp.tanh(y @ kernel.astype(half) + bias.astype(half)[None])
    return jnp.mean(y.astype(jnp.float32) ** 2)

  value, grads = jax.value_and_grad(mpjax.scaled(loss, state))(params)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state, value


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_what_loss_scaling_adds_to_a_step_on_an_h200(gpu_hlo, h200, half):
  # One reduction for 24 gradients of two sizes, and two updates for 24 parameters.
  layer = jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH)
  params = [layer] * LAYERS
  kernels, sources, x = {}, {}, jnp.zeros((32, WIDTH), half)
  for config in (mpjax.NoLossScale(), mpjax.StaticLossScale(8), mpjax.DynamicLossScale()):
    tx = mpjax.loss_scaling(optax.adamw(1e-3), config)
    args = gpu_hlo.aot.placed((params, tx.init(params), x), SingleDeviceSharding(h200))
    step = jax.jit(functools.partial(small_step, tx, half), donate_argnums=(0, 1))
    program = gpu_hlo.hlo.parse(step.lower(*args).compile(gpu_hlo.OPTIONS).as_text())
    assert program.count("conditional") == 0
    found = list(program.kernels())
    name = type(config).__name__
    kernels[name] = len(found)
    ends = (each.source.rpartition("/")[2] for each in found)
    sources[name] = collections.Counter(end for end in ends if end in ("reduce_and", "add"))
  assert sources["NoLossScale"] == {"add": 2 * LAYERS}
  for name in ("StaticLossScale", "DynamicLossScale"):
    assert sources[name] == {"reduce_and": 1, "add": 2}
    assert kernels[name] < kernels["NoLossScale"]


@pytest.mark.gpu_compiler
def test_a_model_of_many_sizes_gets_few_kernels_more_on_an_h200(gpu_hlo, h200):
  # A ResNet of one block in each stage: at most 12, and all that is multiplied in float16.
  case = gpu_hlo.aot.shallower(gpu_hlo.SIZES["cpu"]["resnet"], 1)
  names = "policy", "static scale", "dynamic scale"
  policy, *scaled = (one for one, _ in versions(gpu_hlo, h200, case, "float16", *names))
  for one in scaled:
    assert one["kernels"] <= policy["kernels"] + 12
    assert one["bytes"] <= 1.02 * policy["bytes"]
    assert one["products"] == policy["products"]


def recorded(folder):
  files = sorted((BENCHMARKS / "results" / folder).glob("*.json"))
  assert files
  return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def test_figures_for_a_gpu_are_recorded(gpu_hlo, gpu_ratios):
  assert {model for each in recorded("gpu") for model in each["models"]} <= gpu_ratios.TITLES.keys()
  # Else run `python benchmarks/gpu_ratios.py`.
  assert gpu_ratios.updated(page := gpu_ratios.PAGE.read_text(encoding="utf-8")) == page
  for results in recorded("gpu_hlo"):
    assert results["settings"]["target"] in gpu_hlo.GPUS
    assert results["settings"]["depth"] is None
    assert results["environment"]["versions"].keys() > {"mpjax", "jax", "flax", "optax"}
    assert results["models"].keys() == gpu_hlo.HALVES.keys()
    for each in results["models"].values():
      assert tuple(each["versions"]) == gpu_hlo.aot.VERSIONS
      for name, one in each["versions"].items():
        short = {"float16": "f16", "bfloat16": "bf16"}[each["half"]]
        assert one["products"].keys() == {"f32" if name == "float32" else short}
    by_hand, policy = (results["models"]["resnet"]["versions"][x] for x in ("by hand", "policy"))
    assert all(policy[key] <= 1.01 * by_hand[key] for key in ("kernels", "bytes", "temp_bytes"))


def test_recorded_ratios_are_within_the_bounds():
  # Loss scaling adds at most 8 % kernels and 2 % bytes; no step has a branch. By the estimate the
  # large MLP takes at most two thirds of bfloat16's time in float8.
  scaling = {"kernels": 1.08, "bytes": 1.02, "conditionals": 0}
  scaled = itertools.product(("resnet", "gpt"), ("static scale", "dynamic scale"))
  faster = {"mlp": 1 / 1.5, "wide": 1 / 1.3}
  float8 = {(model, "float8"): {"estimated_seconds": most} for model, most in faster.items()}
  for folder, bounds in (("gpu_steps", dict.fromkeys(scaled, scaling)), ("gpu_float8", float8)):
    for results in recorded(folder):
      assert results["models"].keys() == {model for model, _ in bounds}
      for (model, name), most in bounds.items():
        versions = results["models"][model]["versions"]
        for key, ratio in most.items():
          assert versions[name][key] <= ratio * versions["policy"][key], (folder, model, name, key)


@pytest.mark.gpu_compiler
def test_float32_matmuls_of_a_policy_are_not_tf32_on_an_h200(gpu_hlo, h200):
  @functools.partial(mpjax.autocast, data_argnums=1)
  def loss(w, x):
    kept = mpjax.full_precision(lambda h: h @ h.T)(x @ w)
    return jnp.sum(jnp.sin(x[:, :3] @ w[:3]) @ w) + jnp.sum(kept)

  args = gpu_hlo.aot.placed((jnp.ones((128, 128)),) * 2, SingleDeviceSharding(h200))
  compiled = jax.jit(jax.grad(loss)).lower(*args).compile(gpu_hlo.OPTIONS)
  program = gpu_hlo.hlo.parse(compiled.as_text())
  assert program.products(highest=True) == {"f32": program.products()["f32"]}
  assert program.products().keys() == {"f32", "bf16"}


@pytest.mark.gpu_compiler
def test_diagnostics_round_at_each_cast_on_an_h200(gpu_hlo, h200):
  # XLA for CPUs keeps a cast and back anyway; for GPUs it leaves both out unless it is told not to.
  def there_and_back(x):
    return x.astype(jnp.float16).astype(jnp.float32)

  args = gpu_hlo.aot.placed((jnp.ones(128),), SingleDeviceSharding(h200))
  casts = [
    gpu_hlo.hlo.parse(fn.lower(*args).compile().as_text()).count("convert")
    for fn in (jax.jit(there_and_back), compiled_as_written(there_and_back))
  ]
  assert casts == [0, 2]
