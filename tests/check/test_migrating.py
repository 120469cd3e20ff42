"""The guides for those who come from another system: each feature has a line and a test, or a why.

A feature table is one whose last two columns are "mpjax" and "test id". The pages themselves are
run by test_docs.py.
"""

import ast
import inspect
import pathlib
import re
import runpy
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import flax.training.dynamic_scale
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax
import pytest
from flax import nnx

import mpjax
from tests.lint.test_public_api import NAMES, resolve
from tests.scripts import is_test

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/migrating/*.md"))

NONE = "—"
"""In a cell of a system that does not have the feature, and where no test can be."""

for_readers = runpy.run_path(str(ROOT / "docs/_ext/site_tables.py"))["for_readers"]

WANTED = {
  "features": """scale_loss init_trainer GradScaler init fp32_ops conditional_fp32_ops
    convert_hybrid_block multi_precision keep_batchnorm_fp32 opt_level level add_flags_recursive
    to_float FixedLossScaleManager DynamicLossScaleManager DynamicLossScalingUpdater scaling_factor
    N clear_buffer accum_grad weight_decay comm grads data_feeder solver loss scale cast
    drop_overflow_update master_weights num_losses excluded_sym_names""",
  "torch_amp": """autocast device_type dtype enabled cache_enabled is_autocast_enabled
    get_autocast_dtype is_autocast_available custom_fwd custom_bwd GradScaler init_scale
    growth_factor backoff_factor growth_interval scale unscale_ step update new_scale get_scale
    set_growth_factor set_backoff_factor set_growth_interval is_enabled state_dict
    load_state_dict initialize opt_level cast_model_type patch_torch_functions
    keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses loss_id
    verbosity min_loss_scale max_loss_scale scale_loss delay_unscale delay_overflow_check
    master_params disable_casts half_function float_function promote_function
    register_half_function register_float_function register_promote_function FP16_Optimizer
    static_loss_scale dynamic_loss_scale dynamic_loss_args backward update_master_grads
    clip_master_grads inspect_master_grad_data network_to_half convert_network FP16Model
    prep_param_lists DistributedDataParallel allreduce_always_fp32 gradient_average
    gradient_predivide_factor message_size delay_allreduce allreduce_trigger_params
    retain_allreduce_buffers num_allreduce_streams allreduce_communicators O0 O1 O2 O3""",
  "mxnet": """init target_dtype target_precision_ops fp32_ops conditional_fp32_ops
    layout_optimization init_trainer scale_loss unscale amp_loss_scale convert_model
    convert_hybrid_block convert_symbol convert_bucketing_module target_dtype_ops excluded_sym_names
    cast_optional_params cast_params_offline data_names input_dtypes param_dtypes data_example
    device list_lp16_ops list_fp32_ops list_lp16_fp32_ops list_conditional_fp32_ops
    list_widest_type_cast list_loss_output_functions list_lp16_use_fp32_params amp_cast
    amp_multicast remove_amp_cast cast multi_precision rescale_grad""",
  "mindspore": """auto_mixed_precision build_train_network amp_level level O0 O1 O2 O3 auto dtype
    boost_level cast_model_type keep_batchnorm_fp32 loss_scale_manager custom_mixed_precision
    white_list black_list get_white_list get_black_list to_float add_flags_recursive
    FixedLossScaleManager loss_scale drop_overflow_update DynamicLossScaleManager init_loss_scale
    scale_factor scale_window get_loss_scale update_loss_scale get_update_cell
    get_drop_overflow_update DynamicLossScaler StaticLossScaler unscale adjust all_finite
    init_status TrainOneStepWithLossScaleCell set_sense_scale DynamicLossScaleUpdateCell
    FixedLossScaleUpdateCell""",
  "nnabla": """type_config context_scope backward scale_grad check_inf_or_nan_grad check_inf_grad
    check_nan_grad clip_grad_by_norm DynamicLossScalingUpdater solver loss data_feeder scale
    scaling_factor N clear_buffer accum_grad weight_decay comm grads update channel_last save_states
    load_states pre_hook post_hook""",
  "keras": """set_global_policy set_dtype_policy global_policy dtype_policy set_floatx DTypePolicy
    compute_dtype variable_dtype name quantization_mode convert_input DTypePolicyMap default_policy
    policy_map autocast add_weight LossScaleOptimizer inner_optimizer initial_scale
    dynamic_growth_steps scale_loss dynamic_scale loss_scale_factor auto_scale_loss iterations
    get_config""",
  "jmp": [
    *jmp.__all__,
    *(name for name in vars(jmp.Policy) if not name.startswith("_")),
    *inspect.signature(jmp.Policy).parameters,
    *inspect.signature(jmp.DynamicLossScale).parameters,
    *("scale", "unscale", "adjust"),
  ],
  "haiku": [name for name in vars(hk.mixed_precision) if name.endswith("_policy")],
  "flax_dynamic_scale": [
    *("DynamicScale", "DynamicScaleResult", "value_and_grad"),
    *inspect.signature(flax.training.dynamic_scale.DynamicScale).parameters,
    *inspect.signature(flax.training.dynamic_scale.DynamicScale.value_and_grad).parameters,
  ],
}
"""What each system has, as its source has it: the words that the features of its page must name.

The systems that the tests have installed are asked; of the others, the list was read off the source
of PyTorch 2, Apex before amp was taken out of it, MXNet 1.9 and 2.0, MindSpore 2, NNabla 1.40 and
Keras 3.16.
"""


class Row(NamedTuple):
  """One feature: its number of the line, and its cells by the words of the header."""

  line: int
  header: tuple[str, ...]
  cells: tuple[str, ...]


def split(line: str) -> tuple[str, ...]:
  r"""Returns the cells of a row of a table; `\|` is a bar within one."""
  cells = re.split(r"(?<!\\)\|", line.strip())
  return tuple(cell.strip().replace(r"\|", "|") for cell in cells[1:-1])


def rows(markdown: str) -> Iterator[Row]:
  """Yields the rows of the feature tables of a page."""
  header: tuple[str, ...] = ()
  fenced = False
  for number, line in enumerate(markdown.splitlines(), 1):
    fenced ^= line.startswith("```")
    if fenced or not line.startswith("|"):
      header = ()
    elif not header:
      header = split(line)
    elif header[-2:] == ("mpjax", "test id") and not set(line) <= set("|-: "):
      yield Row(number, header, split(line))


def spans(cell: str) -> list[str]:
  return re.findall(r"`([^`]+)`", cell)


def is_public(name: str) -> bool:
  """Whether `name` is a public name, or an attribute of one."""
  pieces = name.split(".")
  if not any(".".join(pieces[:n]) in NAMES for n in range(2, len(pieces) + 1)):
    return False
  try:
    return resolve(name) is not None
  except AttributeError:
    return False


def faults(row: Row) -> list[str]:
  """Returns what is wrong with a row, if anything."""
  if len(row.cells) != len(row.header):
    return [f"{len(row.cells)} cells under {len(row.header)} headings"]
  found = [f"nothing under {h!r}" for h, c in zip(row.header, row.cells, strict=True) if not c]
  *systems, line, test = row.cells
  if not any(spans(cell) or len(cell) > 3 for cell in systems):
    found.append("no system has it")
  if line.startswith("not offered"):
    if len(line.removeprefix("not offered: ").split()) < 4 or not line.startswith("not offered: "):
      found.append("no reason")
    return found if test == NONE else [*found, "a test of what is not offered"]
  if not spans(line):
    found.append("no line of code")
  names = [name for code in spans(line) for name in re.findall(r"\bmpjax(?:\.\w+)+", code)]
  found += [f"{name} is not public" for name in names if not is_public(name)]
  if not spans(test):
    found.append("no test")
  return found + [f"{name} is no test" for name in spans(test) if not is_test(name)]


def missing(markdown: str, wanted: set[str]) -> set[str]:
  """Returns the words that no feature of a page has in its code."""
  cells = [cell for row in rows(markdown) for cell in row.cells[:-2]]
  return wanted - {
    word for cell in cells for code in spans(cell) for word in re.findall(r"\w+", code)
  }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_feature_has_a_row_and_every_row_a_line_and_a_test_or_a_reason(page):
  markdown = page.read_text(encoding="utf-8")
  found = list(rows(markdown))
  assert len(found) > 3
  assert {row.line: what for row in found if (what := faults(row))} == {}
  wanted = WANTED[page.stem]
  wanted = set(wanted.split() if isinstance(wanted, str) else wanted) - {"self"}
  assert missing(markdown, wanted) == set()
  # The site shows each line, and no ids of tests.
  shown = for_readers(markdown)
  assert "test id" not in shown
  lines = shown.splitlines()
  assert len(lines) == len(markdown.splitlines())
  for row in found:
    assert split(lines[row.line - 1]) == (row.cells[0], row.cells[-2], *row.cells[1:-2])


def test_every_system_has_a_page():
  assert sorted(WANTED) == [page.stem for page in PAGES]
  readme = (ROOT / "README.md").read_text(encoding="utf-8")
  overview = (ROOT / "docs/migrating/features.md").read_text(encoding="utf-8")
  assert "(docs/migrating/features.md)" in readme
  assert [page.name for page in PAGES if f"({page.name})" not in overview] == ["features.md"]


NOT_RUN = {
  "state, metrics = update(state, next(data))": "compiles a training step",
  "tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=value_fn)": (
    "compiles a line search"
  ),
  'jax.lax.psum(grads, "data")': "has to be inside of shard_map",
}
"""The lines that nothing here runs, and why: a new one is to be run, or to be named here."""


def worlds() -> list[dict[str, Any]]:
  """Returns what the names of the lines are: a line must hold in one of these worlds."""
  # A line that gives back a function has run when it has given it back: nothing is trained here.
  # The guides write `tx` for the optimizer inside of `mpjax.loss_scaling(tx)` and for what comes
  # out.
  net = nn.Sequential([nn.Dense(2), nn.Dense(2)])
  layer = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  params = {"head": {"kernel": jnp.ones((2, 2))}, "dense1": jnp.ones(2)}
  half = mpjax.Policy.parse("float16").cast_to_compute(params)
  layer_of_nnx = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  x, sgd = jnp.ones((1, 2)), optax.sgd(0.1, momentum=0.9)
  tx = mpjax.loss_scaling(mpjax.master_weights(sgd))
  several = mpjax.loss_scaling(sgd, {"a": mpjax.DynamicLossScale(), "b": mpjax.StaticLossScale(8)})
  state = mpjax.TrainState.create(half, tx)
  plain = {
    **{"mpjax": mpjax, "jax": jax, "jnp": jnp, "nn": nn, "optax": optax, "re": re},
    **{"model": net, "net": net, "MyModule": nn.Dense, "MyLayer": nn.Dense},
    **{"variables": {"params": {"layers_0": layer, "layers_1": layer}}, "x": x, "batch": {"x": x}},
    **{"params": params, "half": half, "grads": half, "updates": half},
    **{"weights": params, "tree": params, "new": params, "old": params},
    **{"tx": sgd, "solver": sgd, "inner": sgd, "hook": optax.clip(1.0), "max_norm": 1.0},
    **{"opt_state": state.opt_state, "state": state, "path": state, "loss": jnp.float32(1)},
    **{"policy": mpjax.Policy(), "norms": mpjax.Rule(mpjax.Policy(), module=nn.LayerNorm)},
    "primitive": "tanh",
    **dict.fromkeys(("fn", "loss_fn", "forward"), jnp.sum),
    "keep": lambda module, method, call, cast: call,
    "loss_scale": mpjax.NoLossScale(),
    "view": mpjax.nnx.with_policy(layer_of_nnx, "mixed_float16"),
  }
  other = {"model": layer_of_nnx, "opt_state": several.init(params), "path": params}
  return [plain, {**plain, "tx": tx, "params": half}, {**plain, **other}]


def failure(code: str, names: dict[str, Any]) -> str:
  """Runs a line; returns why it failed, or an empty text."""
  try:
    exec(code, names)
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  return ""


def failures(lines: list[str], objects: list[dict[str, Any]]) -> dict[str, list[str]]:
  """Runs the lines of a row, in order; returns those that fail in every world, with each error."""
  # A line that calls nothing, as a name alone or the type of a field, has nothing to run.
  own = [dict(names) for names in objects]
  found = {}
  for code in lines:
    statement = f"{code}\n  pass" if code.endswith(":") else code  # That of a `with` has a body.
    if any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(statement))):
      found[code] = [failure(statement, names) for names in own]
  return {code: why for code, why in found.items() if all(why)}


@pytest.mark.filterwarnings("ignore:mpjax.policy_scope")  # The body of a `with` is empty.
@pytest.mark.standard_promotion  # NNX promotes when it makes a layer.
def test_the_lines_of_the_tables_run():
  objects = worlds()
  found: dict[str, list[str]] = {}
  for page in PAGES:
    for row in rows(page.read_text(encoding="utf-8")):
      if not row.cells[-2].startswith("not offered"):
        found |= failures(spans(row.cells[-2]), objects)
  assert {code: why for code, why in found.items() if code not in NOT_RUN} == {}
  assert set(NOT_RUN) == set(found)
  # Lines that do not run are found; and a line sees the names of those before it in its row.
  wrong = {
    "tx.update(grads, params)": "MpjaxTypeError",
    "tx.update(grads, mine)": "NameError",
    "mpjax.unscale(grads, state=opt_state)": "TypeError",
  }
  assert failures(["tx", *wrong], objects).keys() == wrong.keys()
  for code, error in wrong.items():
    assert any(why.startswith(error) for why in failures([code], objects)[code])
  lines = ["new_tx = mpjax.loss_scaling(tx)", "new_tx.init(weights)"]
  assert failures(lines, objects) == {}
  assert failures(lines[1:], objects).keys() == {lines[1]}


ID = "tests/check/test_migrating.py::test_faults_of_rows_are_found"
LINE = "`mpjax.value_and_grad(loss_fn, opt_state)`"
GOOD = f"| `scale(loss)` | {LINE} | `{ID}` |"
TABLE = f"""
| feature | mpjax | test id |
|---|---|---|
{GOOD}
| `a` | not offered: JAX has no such thing | — |
| `b` | `mpjax.DynamicLossScale(init_scale=2**16)`, in \
`with mpjax.linen.policy_scope(p):` | `{ID}` |
| `c` | `mpjax.make_train_step(..., micro_batches=4)`, `mpjax.Policy.parse("p=f32")` | `{ID}` |

| feature | more | test |
|---|---|---|
| no table | of features | |
"""


WRONG = [
  ("`scale(loss)`", "", "nothing under 'feature'"),
  ("`scale(loss)`", "—", "no system has it"),
  ("`scale(loss)` |", "`scale(loss)` | |", "4 cells under 3 headings"),
  (f"`{ID}`", "", "nothing under 'test id'"),
  (f"`{ID}`", "—", "no test"),
  (ID, ID + "_x", f"{ID}_x is no test"),
  (ID, ID.replace("tests/", ""), f"{ID.replace('tests/', '')} is no test"),
  (LINE, "", "nothing under 'mpjax'"),
  (LINE, "the usual way", "no line of code"),
  (LINE, "not offered", "no reason"),
  (LINE, "not offered: why", "no reason"),
  (LINE, "not offered: for a good reason", "a test of what is not offered"),
  ("value_and_grad(", "value_grad(", "mpjax.value_grad is not public"),
  ("value_and_grad(", "transforms.grad(", "mpjax.transforms.grad is not public"),
  ("value_and_grad(", "Policy.read(", "mpjax.Policy.read is not public"),
]
"""Changes of the good row, and the fault that each must have."""


def test_faults_of_rows_are_found():
  found = list(rows(TABLE))
  assert [row.line for row in found] == [4, 5, 6, 7]
  assert [faults(row) for row in found] == [[], [], [], []]
  for old, new, fault in WRONG:
    assert GOOD.count(old) == 1
    row = next(rows(TABLE.replace(GOOD, GOOD.replace(old, new))))
    assert fault in faults(row)
  assert missing(TABLE, {"scale", "loss", "a"}) == set()
  # Neither a part of a word, nor our own line, nor a table of something else.
  assert missing(TABLE, {"scal", "micro_batches", "table"}) == {"scal", "micro_batches", "table"}
  fenced = f"```text\n{TABLE}```\n"
  assert list(rows(fenced)) == []
  assert for_readers(fenced) == fenced
  other = "| a | b |\n|---|---|\n| `x \\| y` | z |\n"
  assert for_readers(other) == other
