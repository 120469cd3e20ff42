"""The LSTM example reaches the perplexity of float32, and hands its carry from window to window."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import mpjax
from tests import programs

STEPS, FEW = 120, 40  # The text is that of Python itself, and harder from one version to the next.
SIZES = {"rows": 16, "window": 24}


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
  """What the short trainings of this file leave, for all tests."""
  return {}


@pytest.fixture
def lstm(example) -> Any:
  return example("lstm_language_model")


@pytest.fixture
def model(lstm) -> Any:
  return lstm.LanguageModel(features=64)


@pytest.fixture
def runs(lstm, model, kept, tmp_path_factory) -> Any:
  if not kept:
    text, path = io.StringIO(), tmp_path_factory.mktemp("lstm") / "new" / "plot.png"
    console, policies = Console(file=text, width=120), ("float32", "mixed_float16")
    found = lstm.main(FEW, path, policies, console, model=model, **SIZES)
    kept |= {**found, "text": text.getvalue(), "path": path}
  return kept


def entropy_of_characters(train, held_out):
  """What a character of the held-out text costs one who knows how frequent each is, and no more."""
  counts = np.bincount(train, minlength=96) + 1.0
  return -np.log(counts / counts.sum())[held_out].mean()


@pytest.mark.convergence
def test_half_learns_what_float32_learns(example, lstm, model):
  trained = [("float32", 0), ("mixed_float16", 0), ("float32", 1), ("float32", 2)]
  reference, half, *others = (
    lstm.train(policy, STEPS, lambda: None, seed=seed, model=model, **SIZES)
    for policy, seed in trained
  )
  blind = entropy_of_characters(*example("python_reference").load_text())
  seeds = [run.state.held_out_loss for run in (reference, *others)]
  for run in (reference, half, *others):
    assert run.losses.shape == (STEPS,)
    assert run.state.held_out_loss < blind - 0.1
  difference = half.state.held_out_loss - reference.state.held_out_loss
  assert 0 < abs(difference) < max(seeds) - min(seeds)
  # It doubled after each 50 finite steps.
  assert half.figures["final loss scale"] == str(2**17)
  assert half.figures[f"skipped steps, of {STEPS}"] == "0"


def test_table_and_plot(runs):
  for policy in ("float32", "mixed_float16"):
    perplexity = runs[policy].figures["held-out perplexity of a character"]
    assert float(perplexity) == pytest.approx(np.exp(runs[policy].state.held_out_loss), abs=1e-3)
    assert perplexity in runs["text"]
  assert runs["mixed_float16"].figures["final loss scale"] == str(2**15)
  assert runs["mixed_float16"].figures[f"skipped steps, of {FEW}"] == "0"
  assert runs["path"].read_bytes().startswith(b"\x89PNG")


def loops(program):
  """Yields the dtypes of what each loop over time carries, and of what it reads at each step."""
  for eqn in program.eqns:
    if eqn.primitive.name == "scan":
      constants, carried = programs.parts_of_scan(eqn)
      dtypes = [var.aval.dtype.name for var in eqn.invars]
      yield set(dtypes[constants : constants + carried]), set(dtypes[:constants])
    for inner in programs.inner_jaxprs(eqn.params):
      yield from loops(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_are_half_and_what_runs_through_time_is_float32(lstm, model, half):
  training = lstm.prepare(f"mixed_{half}", model, FEW)
  variables = jax.eval_shape(lambda key: lstm.first_variables(model, key, 4), jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((4, 9), jnp.int32)
  program = jax.make_jaxpr(jax.grad(training.loss_fn, has_aux=True))(
    variables["params"], variables["carry"], tokens, jax.random.key(0)
  )
  assert programs.half_share(program) == 1
  # Forward the carry; backward its gradient and the sums of those of the weights.
  assert list(loops(program.jaxpr)) == [({"float32"}, {half})] * 4


def test_windows_follow_each_other(lstm):
  text = np.arange(1000)
  first, second, *_ = found = list(lstm.windows(text, 30, 3, rows=4, window=10))
  assert [x.shape for x in found] == [(4, 11)] * 30
  np.testing.assert_array_equal(first[:, -1], second[:, 0])
  # In each row the text goes on, and begins anew at its end.
  for row in np.concatenate([x[:, :-1] for x in found], axis=1):
    np.testing.assert_array_equal(np.diff(row) % 1000, 1)
  assert len({int(x) for x in np.diff(first[:, 0]) % 1000}) == 1
  assert not np.array_equal(first, next(lstm.windows(text, 1, 4, rows=4, window=10)))


def test_two_windows_are_one_long_one(lstm, model, runs):
  """The carry that the first leaves is all that the second has to know of it."""
  training = lstm.prepare("float32", model, FEW)
  params, loss_fn = runs["float32"].state.state.params, programs.jitted(training.loss_fn)
  tokens = np.random.default_rng(0).integers(0, 96, (2, 17))
  start = jax.tree.map(lambda x: jnp.zeros_like(x[:2]), runs["float32"].state.state.model_state)
  first, (carry, _) = loss_fn(params, start, tokens[:, :9], None)
  second, (last, _) = loss_fn(params, carry, tokens[:, 8:], None)
  forgotten, _ = loss_fn(params, start, tokens[:, 8:], None)
  whole, (expected, _) = loss_fn(params, start, tokens, None)
  np.testing.assert_allclose((first + second) / 2, whole, rtol=1e-6)
  assert abs(forgotten - second) > 1e-3
  for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_window_that_overflows_leaves_the_carry_alone(lstm, model, runs):
  training = lstm.prepare("mixed_float16", model, FEW)
  state = runs["mixed_float16"].state.state
  state = jax.tree.map(jnp.copy, state)  # A step takes the memory of its argument.
  state = state._replace(opt_state=mpjax.set_loss_scale(state.opt_state, 2.0**24))
  before = jax.device_get((state.params, state.model_state, state.step))
  tokens = next(lstm.windows(np.arange(5000) % 96, 1, 0, **SIZES))
  state, metrics = training.step(state, tokens)
  assert not metrics["finite"]
  assert metrics["loss_scale"] == 2**23
  after = jax.device_get((state.params, state.model_state, state.step))
  for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
    assert (new.dtype, new.tobytes()) == (old.dtype, old.tobytes())
  assert {x.dtype.name for x in jax.tree.leaves(after[1])} == {"float32"}
  state = state._replace(opt_state=mpjax.set_loss_scale(state.opt_state, 2.0**10))
  state, metrics = training.step(state, tokens)
  assert metrics["finite"]
  assert not np.array_equal(state.model_state["layer_0"][0], before[1]["layer_0"][0])
