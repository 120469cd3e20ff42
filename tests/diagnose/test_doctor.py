"""What the doctor says of devices, versions and settings. Devices are plain objects."""

import json
import platform
import re
import types

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.doctor import OPTIONS, diagnosis, doctor
from mpjax._jaxpr.reader import walk


def device(platform="gpu", kind="NVIDIA H100", capability="9.0"):
  fields = {"platform": platform, "device_kind": kind}
  if capability is not None:
    fields["compute_capability"] = capability
  return types.SimpleNamespace(**fields)


CPU, TPU = device("cpu", "cpu", None), device("tpu", "TPU v5 lite", None)
V100, H100 = device(kind="Tesla V100", capability="7.0"), device()


def of(*devices, environment=(), **options):
  return diagnosis(devices, dict.fromkeys(OPTIONS) | options, dict(environment))


def meaning(found, name):
  ((_, value, text),) = [row for row in found.settings if row[0] == name]
  return value, text


PRESETS = [
  (H100, "mixed_bfloat16", "no loss scale"),
  (TPU, "mixed_bfloat16", "no loss scale"),
  (V100, "mixed_float16", "mpjax.loss_scaling"),
  (CPU, "float32", "no speed"),
  (device(kind="GTX 1080", capability="6.1"), "float32", "No units for low precision are"),
  (device(kind="AMD MI300X", capability="gfx942"), "float32", "No units for low precision are"),
]
PRECISIONS = [
  (H100, None, "multiplied in TF32"),
  (H100, "default", "multiplied in TF32"),
  (H100, "highest", "multiplied as float32, everywhere"),
  (H100, "BF16_BF16_F32_X3", "multiplied so, everywhere"),
  (TPU, None, "multiplied in bfloat16"),
  (V100, None, "Without effect here"),
  (CPU, "highest", "Without effect here"),
]
FLAGS = [
  ("", "not set (true)", "may leave out a cast"),
  ("--xla_allow_excess_precision=true", "true", "may leave out a cast"),
  ("--xla_x=1 --xla_allow_excess_precision=false", "false", "Each cast to low precision rounds"),
  ("--xla_allow_excess_precision_x=false", "not set (true)", "may leave out a cast"),
]


@pytest.mark.parametrize(("one", "preset", "why"), PRESETS)
def test_the_preset_that_fits(one, preset, why):
  found = of(one)
  assert found.preset == preset
  assert why in found.why
  assert mpjax.Policy.parse(found.preset)
  assert f'Policy for this machine: "{preset}"' in str(found)


@pytest.mark.parametrize(("one", "precision", "says"), PRECISIONS)
def test_what_the_precision_of_matmuls_means(one, precision, says):
  found = of(one, jax_default_matmul_precision=precision)
  value, text = meaning(found, "jax_default_matmul_precision")
  assert value == (precision or "not set")
  assert says in text


@pytest.mark.parametrize(("flags", "value", "says"), FLAGS)
def test_what_excess_precision_means(flags, value, says):
  found = of(H100, environment={"XLA_FLAGS": flags} if flags else {})
  assert meaning(found, "xla_allow_excess_precision")[0] == value
  assert says in meaning(found, "xla_allow_excess_precision")[1]


def test_devices_are_counted_by_kind():
  found = of(H100, device(), V100)
  assert [(row[0], row[2]) for row in found.devices] == [("NVIDIA H100", "2"), ("Tesla V100", "1")]
  assert found.warnings == ("There are devices of 2 kinds; the policy is for NVIDIA H100.",)
  assert of(H100, device()).warnings == ()


def test_what_gets_in_the_way():
  found = of(H100, jax_debug_nans=True, jax_debug_infs=True)
  assert [text.split()[0] for text in found.warnings] == ["jax_debug_nans", "jax_debug_infs"]
  assert str(found).count("Warning: ") == 2
  assert [meaning(found, f"jax_debug_{name}")[0] for name in ("nans", "infs")] == ["True", "True"]


def test_the_precision_that_a_setting_advises_is_that_of_float32_matmuls():
  _, text = meaning(of(H100), "jax_default_matmul_precision")
  (advised,) = re.findall(r"mpjax\.Policy\(.*?\)", text)
  x = jax.ShapeDtypeStruct((8, 8), "float32")

  def precisions(policy):
    fn = mpjax.with_policy(lambda w, x: x @ w, policy)
    eqns = walk(jax.make_jaxpr(fn)(x, x))
    return [eqn.params["precision"] for eqn in eqns if eqn.primitive.name == "dot_general"]

  assert precisions("float32") == [None]
  assert precisions(eval(advised, {"mpjax": mpjax})) == [(jax.lax.Precision.HIGHEST,) * 2]


def test_bfloat16_keeps_most_activations_in_half_of_the_bytes():
  """What the doctor says of a device without units for low precision."""
  assert '"mixed_bfloat16" stores most activations in 2 bytes' in of(CPU).why
  x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 8), (8, 8)))

  def layers(w, x):
    for _ in range(8):
      x = jnp.tanh(x @ w)
    return x

  def kept(policy):
    fn = mpjax.with_policy(layers, policy)
    report = mpjax.audit(jax.grad(lambda w, x: jnp.sum(fn(w, x))))(w, x)
    return sum(report.residual_bytes.values())

  assert kept("mixed_bfloat16") < 0.65 * kept("float32")


def test_the_report_is_80_columns_wide_and_json_has_all_of_it():
  flags = " ".join(f"--xla_gpu_some_flag_with_a_long_name_{i}=true" for i in range(9))
  found = of(H100, V100, CPU, TPU, environment={"XLA_FLAGS": flags}, jax_debug_nans=True)
  assert max(map(len, str(found).splitlines())) <= 80
  data = json.loads(found.to_json())
  assert data["preset"] == "mixed_bfloat16"
  assert data["devices"] == [list(row) for row in found.devices]
  assert {row[0] for row in data["settings"]} == {*OPTIONS, "xla_allow_excess_precision"}
  assert "NVIDIA H100" in found._repr_html_()


def test_this_machine():
  found = doctor()
  assert sum(int(row[2]) for row in found.devices) == len(jax.devices())
  assert dict(found.versions)["jax"].startswith(jax.__version__)
  assert dict(found.versions)["python"] == platform.python_version()
  with jax.default_matmul_precision("highest"):
    assert meaning(doctor(), "jax_default_matmul_precision")[0] == "highest"
