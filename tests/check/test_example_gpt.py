"""The GPT example learns in half as in float32, in parts, and writes with a half cache."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import mpjax
from tests import programs
from tests.partitioned import collectives

STEPS, FEW = 60, 8
DEVICES = 2
PROMPT = "The "
TEMPERATURE = 0.7
POLICIES = ("float32", "mixed_float16")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
  """What the short trainings of this file leave, for all tests."""
  return {}


@pytest.fixture
def gpt(example) -> Any:
  return example("gpt")


@pytest.fixture
def model(gpt) -> Any:
  return gpt.Gpt(layers=2, width=32, heads=2, context=32)


@pytest.fixture
def runs(gpt, model, kept, tmp_path_factory) -> Any:
  if not kept:
    text, path = io.StringIO(), tmp_path_factory.mktemp("gpt") / "new" / "plot.png"
    console, options = Console(file=text, width=120), {"model": model, "devices": DEVICES}
    writing = {"prompt": PROMPT, "temperature": TEMPERATURE}
    kept |= gpt.main(FEW, path, POLICIES, console, **options, **writing)
    kept["text"], kept["path"] = text.getvalue(), path
  return kept


@pytest.mark.convergence
def test_half_learns_what_float32_learns(example, gpt, model):
  train, held_out = example("python_reference").load_text()
  frequencies = np.bincount(train, minlength=96) + 1.0
  blind = -np.log(frequencies / frequencies.sum())[held_out].mean()
  trained = [("float32", 0), ("mixed_float16", 0), ("float32", 1), ("float32", 2)]
  options = {"model": model, "devices": DEVICES}
  reference, half, *others = (
    gpt.train(policy, STEPS, lambda: None, seed=seed, **options) for policy, seed in trained
  )
  seeds = [run.state.held_out_loss for run in (reference, *others)]
  for run in (reference, half, *others):
    assert run.losses.shape == (STEPS,)
    assert run.state.held_out_loss < blind - 0.1
  difference = half.state.held_out_loss - reference.state.held_out_loss
  assert 0 < abs(difference) < max(seeds) - min(seeds)
  # It doubled after 50 finite steps.
  assert half.figures["final loss scale"] == str(2**16)


def test_table_plot_and_what_it_wrote(example, runs):
  for policy in POLICIES:
    run = runs[policy]
    perplexity = run.figures["held-out perplexity of a character"]
    assert float(perplexity) == pytest.approx(np.exp(run.state.held_out_loss), abs=1e-3)
    assert perplexity in runs["text"]
    written = example("python_reference").decode(run.state.written.tokens[1])
    assert written.startswith(PROMPT)
    assert all(line.strip() in runs["text"] for line in written.splitlines())
  assert runs["mixed_float16"].figures["final loss scale"] == str(2**15)
  assert runs["path"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_and_moments_are_float32_and_in_parts(runs, policy):
  state = runs[policy].state.state
  leaves = jax.tree.leaves((state.params, state.opt_state.inner_state))
  arrays = [x for x in leaves if x.ndim]
  assert len(arrays) == 3 * 11
  for x in arrays:
    assert x.dtype == jnp.float32
    assert [shard.data.size for shard in x.addressable_shards] == [x.size // DEVICES] * DEVICES


def test_the_program(gpt, model):
  """Layers are scanned and recomputed, in half; weight gradients come out in float32."""
  training = gpt.prepare("mixed_float16", model, FEW, DEVICES)
  params = jax.eval_shape(gpt.initialiser(model, DEVICES), jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((gpt.ROWS, model.context + 1), jnp.int32)
  program = jax.make_jaxpr(jax.grad(training.loss_fn, has_aux=True))(
    params, (), tokens, jax.random.key(0)
  )
  assert programs.half_share(program) == 1
  products = programs.products(program)
  widths = {product.result.partition("[")[0] for product in products}
  assert widths == {"float16", "float32"}
  assert set(programs.dtypes_of(program, "exp")) == {"float32"}
  names = [eqn.primitive.name for eqn in nodes(program.jaxpr)]
  assert names.count("scan") == 2
  assert any(name in ("remat", "remat2", "checkpoint") for name in names)


def nodes(program):
  for eqn in program.eqns:
    yield eqn
    for inner in programs.inner_jaxprs(eqn.params):
      yield from nodes(getattr(inner, "jaxpr", inner))


def test_parameters_travel_in_half_and_their_gradients_in_float32(gpt, model, runs):
  """Activations stay where they are, and this is what makes it FSDP."""
  training = gpt.prepare("mixed_float16", model, FEW, DEVICES)
  tokens = training.shard(np.zeros((gpt.ROWS, model.context + 1), np.int32))
  params = runs["mixed_float16"].state.state.params
  gradient = programs.jitted(jax.grad(training.loss_fn, has_aux=True))
  found = [x for x in collectives(gradient, params, (), tokens, jax.random.key(0)) if x.shape[1:]]
  table = (96, model.width)  # Looked up as it is stored, and its rows are cast.
  gathered = [x for x in found if x.op == "all-gather"]
  assert {x.dtype for x in gathered if x.shape != table} == {"f16"}
  assert {x.shape for x in gathered} >= {(32, 128), (128, 32), (32, 2, 16), (2, 16, 32)}
  # `weight_grad_dtype` does not reach the table as output layer, nor what is added up of `places`.
  kernels = [x for x in found if x.op == "all-reduce" and x.shape[0] == 1]
  assert {x.dtype for x in kernels} == {"f32"}
  assert len(kernels) >= 6
  rows = (gpt.ROWS, gpt.ROWS // DEVICES)
  assert not [x for x in found if x.shape[0] in rows and x.shape[1:2] == (model.context,)]


def test_what_it_writes_with_is_half(gpt, model, runs):
  params, cache, _ = runs["mixed_float16"].state.written
  trained = jax.device_get(runs["mixed_float16"].state.state.params)
  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  norms = 0
  for (path, x), master in zip(flat, treedef.flatten_up_to(trained), strict=True):
    is_norm = "LayerNorm" in jax.tree_util.keystr(path)
    norms += is_norm
    wanted = master if is_norm else master.astype(np.float16)
    assert (x.dtype, np.asarray(x).tobytes()) == (wanted.dtype, wanted.tobytes())
  assert norms == 3
  assert cache["place"] == model.context - 1
  attention = cache["layers"]["MultiHeadDotProductAttention_0"]
  shape = (model.layers, 2, model.context, model.heads, model.width // model.heads)
  for name in ("cached_key", "cached_value"):
    assert (attention[name].dtype, attention[name].shape) == (jnp.float16, shape)
    # All places but the last, which nothing comes after, were written.
    used = np.abs(np.asarray(attention[name], np.float32)).max(axis=(0, 1, 3, 4)) > 0
    assert used.tolist() == [True] * (model.context - 1) + [False]
  sizes = {p: runs[p].figures["keys and values in the cache"] for p in POLICIES}
  assert sizes == {"float32": "32 kB", "mixed_float16": "16 kB"}


def test_every_character_is_the_one_of_the_whole_model(model, runs):
  """Also those that were drawn: the noise that chose them is drawn again."""
  run = runs["mixed_float16"]
  params, _, tokens = run.state.written

  def all_at_once(params, tokens):
    logits = run.state.model.apply({"params": params}, tokens[:, :-1])
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold(jax.random.key(0), jnp.arange(model.context - 1))
    return logits, jax.vmap(lambda key: jax.random.gumbel(key, (2, 96)))(keys)

  logits, noise = programs.run(all_at_once, params, tokens)
  weight = np.array([0, TEMPERATURE], np.float32)[:, None, None]
  scores = np.asarray(logits) + weight * np.moveaxis(np.asarray(noise), 0, 1)
  free = slice(len(PROMPT) - 1, None)
  scores, written = scores[:, free], np.asarray(tokens)[:, 1:][:, free]
  first, second = np.moveaxis(np.sort(scores)[..., :-3:-1], -1, 0)
  clear = first - second > 1e-2  # Else rounding may decide.
  assert clear.mean() > 0.8
  np.testing.assert_array_equal(scores.argmax(-1)[clear], written[clear])
  assert len(set(written[1].tolist())) > 5
  same, count = run.figures["characters chosen without a cache as well"].split(" of ")
  assert int(count) == written.shape[1]
  assert clear[0].sum() <= int(same) <= int(count)


def test_a_batch_that_overflows_leaves_no_trace_on_any_device(gpt, model, runs):
  training = gpt.prepare("mixed_float16", model, FEW, DEVICES)
  state = runs["mixed_float16"].state.state
  state = jax.tree.map(jnp.copy, state)  # A step takes the memory of its argument.
  state = state._replace(opt_state=mpjax.set_loss_scale(state.opt_state, 2.0**24))
  before = jax.device_get((state.params, state.opt_state.inner_state, state.step))
  tokens = next(gpt.windows(np.arange(5000) % 96, 1, 0, gpt.ROWS, model.context + 1))
  state, metrics = training.step(state, training.shard(tokens))
  assert not metrics["finite"]
  assert metrics["loss_scale"] == 2**23
  after = jax.device_get((state.params, state.opt_state.inner_state, state.step))
  for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
    assert (new.dtype, new.tobytes()) == (old.dtype, old.tobytes())
