"""Tables and rules of modules with long names, as those of Hugging Face have, in each report."""

import ast
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from rich.cells import cell_len

import mpjax
from mpjax._diagnose.audit.findings import summed_over_layers
from mpjax._diagnose.report import MOST, Report, Section
from mpjax._diagnose.tables import WIDTH, broken_rule
from mpjax._policy.rules import glob_of

LAYERS = 2
MODEL = ("bert_model_for_pretraining", "encoder", "layer")
ATTENTION = ("attention", "self_attention_with_rotary_embeddings")
QUERY = "/".join((*MODEL, "1", *ATTENTION, "query_projection"))


class Attentions(nn.Module):
  """A module inside of others, or layers inside of others."""

  names: tuple[str, ...]
  layers: int = 0

  @nn.compact
  def __call__(self, x):
    if self.names:
      return Attentions(self.names[1:], self.layers, name=self.names[0])(x)
    for i in range(self.layers):
      x = x + Attentions(ATTENTION, name=str(i))(x)
    if self.layers:
      return x
    y = nn.Dense(16, name="query_projection")(x)
    return nn.Dense(16, name="output_projection")(jnp.sin(30 * y))


class FlaxBertForSequenceClassificationModule(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = Attentions(MODEL, LAYERS)(x)
    return nn.Dense(3, name="classifier_of_the_sequence")(x)


X = jnp.linspace(-2, 2, 64).reshape(4, 16)
RULES = [
  mpjax.Rule("c=bf16", path=f"**/{QUERY.partition('/')[2]}"),
  mpjax.Rule("float32", module=(nn.LayerNorm, nnx.LayerNorm)),
]
BERT = FlaxBertForSequenceClassificationModule()
POLICIED = mpjax.with_policy(BERT, "mixed_float16", RULES, unmatched="ignore")


def loss(variables, x, model=BERT):
  return jnp.mean(jnp.square(model.apply(variables, x)))


def audit(variables):
  return mpjax.audit(jax.grad(functools.partial(loss, model=POLICIED)))(variables, X)


def ranges(variables):
  tx = optax.sgd(1e-12)

  def step(params, x):
    updates, _ = tx.update(jax.grad(loss)(params, 1e-3 * x), tx.init(params), params)
    return optax.apply_updates(params, updates)

  return mpjax.ranges(step)(variables, X)


def compare(variables):
  return mpjax.compare(loss, policy="mixed_bfloat16")(variables, X)


def find_nonfinite(variables):
  large = jax.tree.map(lambda x: 1e4 * x, variables)
  in_float16 = mpjax.with_policy(BERT, "mixed_float16")
  return mpjax.find_nonfinite(functools.partial(loss, model=in_float16))(large, X)


def tune(variables):
  return mpjax.tune(loss, "mixed_float16", tolerance=3e-3)(variables, X)


def sensitivity(variables):
  return mpjax.sensitivity(loss, policy="mixed_bfloat16")(variables, X)


MAKERS = (audit, ranges, compare, find_nonfinite, sensitivity, tune)


@functools.cache
def report_of(maker):
  return maker(BERT.init(jax.random.key(0), X))


def printed_paths(text):
  """Returns the paths of a report, with the folder above their table or the rows around them."""
  paths, folder, around = set(), "", []
  # A path that is longer than a line goes on after a slash.
  for line in [*re.sub(r"/\n *", "/", text).splitlines(), "", *text.splitlines()]:
    stated = re.match(r"Each (?:module|leaf|parameter) is in ([^\s,]+)", line)
    if stated or not line:
      folder = f"{stated[1]}/" if stated else ""
    name = re.split(r" {2,}| \((?:call|\d)", line.strip())[0]
    depth = (len(line) - len(line.lstrip())) // 2
    around = [*around[:depth], name.rstrip("/")]
    paths |= {*line.split(), folder + name, "/".join(around)}
    if name == ".":
      paths.add(folder.rstrip("/"))
  return paths


def printed_rules(text):
  """Returns the code of the rules in a report."""
  for found in re.finditer(r"mpjax\.Rule\(", text):
    ends = (end.end() for end in re.finditer(r"\)", text) if end.end() > found.end())
    codes = (text[found.start() : end] for end in ends)
    yield next(code for code in codes if is_code(code))


def is_code(text):
  try:
    ast.parse(text, mode="eval")
  except SyntaxError:
    return False
  return True


def expected_paths(report):
  """Returns the paths of the modules that the tables of a report are about."""
  match type(report).__name__:
    case "AuditReport":
      tables = (report.modules, report.on_purpose, report.lossy)
      return [row.path for table in tables for row in summed_over_layers(table)[:MOST]]
    case "RangesReport":
      return [g.path for g in report.of("updates") if g.lost_updates][:MOST]
    case "CompareReport":
      return [row.path for row in report.rows if "/" in row.path]
    case "TuneReport":
      return [each.path for each in report.modules if each.error > 0]
    case "SensitivityReport":
      return [row[0] for row in report.sections()[0].rows[:3]]
    case _:
      return [report.path]


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_report_of_long_names_fits_a_terminal_and_has_every_path(maker):
  report = report_of(maker)
  text = str(report)
  assert max(map(len, text.splitlines())) <= WIDTH
  expected = expected_paths(report)
  assert any(len(path) > 60 for path in expected)
  # Layers that differ in their numbers alone share a row, with their count.
  assert {re.sub(r" \(\d+\)$", "", path) for path in expected} <= printed_paths(text)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [audit, find_nonfinite, tune], ids=lambda maker: maker.__name__)
def test_the_rules_of_a_report_are_code_that_makes_a_policy(maker):
  names = {"mpjax": mpjax, "re": re, "LayerNorm": nn.LayerNorm}
  rules = [eval(code, names) for code in printed_rules(str(report_of(maker)))]
  assert rules
  mpjax.with_policy(BERT, "mixed_bfloat16", rules, unmatched="ignore")


class Example(Report):
  def __init__(self, columns, rows):
    self._section = Section.cut("Title", columns, rows)

  def sections(self):
    return [self._section]


FOLDER = "a_transformer/encoder/layers"


def test_a_folder_is_printed_once_and_itself_as_a_dot():
  paths = [f"{FOLDER}/{i}/attention/query_projection" for i in range(5)]
  rows = [(path, "1.5 k", "a dtype that takes much space") for path in [FOLDER, *paths]]
  text = str(Example("module, n, dtype", [("(root)", "1", "x"), *rows]))
  assert text.count(FOLDER) == 1
  assert {FOLDER, *paths} <= printed_paths(text)
  assert "\n(root) " in text
  short = str(Example("module, n", [row[:2] for row in rows]))
  assert short.count(FOLDER) == 6  # They fit as they are.


def test_a_path_that_is_longer_than_its_column_is_a_line_above_its_row():
  paths = [f"one_model/{'a_long_name_' * 3}{i}" for i in range(3)]
  rows = [(path, *map(str, range(10000, 10006)), "x") for path in [*paths, "other/b"]]
  lines = str(Example("leaf, a, b, c, d, e, f, note", rows)).splitlines()
  assert {*paths} <= {*lines}
  numbers = [line for line in lines if "10005" in line]
  assert len(numbers) == len(rows)
  assert len({line.index("10005") for line in numbers}) == 1
  assert numbers[-1].startswith("other/b ")


def test_wide_characters_take_two_columns():
  path = "\u5c64" * 36
  assert path in str(Example("module, note", [(path, "a note of 20 columns")])).splitlines()
  rule = mpjax.Rule("float32", path=path)
  code = broken_rule(repr(rule), 40)
  assert max(map(cell_len, code.splitlines())) <= 40
  assert eval(code, {"mpjax": mpjax}) == rule


def test_a_reason_that_all_rows_share_is_printed_once_also_for_rows_that_are_not_printed():
  rows = [(f"layer_{i}", "the same reason") for i in range(2 * MOST)]
  assert str(Example("module, because of", rows)).count("the same reason") == 1
  rows[-1] = ("layer", "another reason")
  assert str(Example("module, because of", rows)).count("the same reason") == MOST
  assert "All rows" not in str(Example("module, because of", rows[:1]))


def test_a_column_without_text_in_the_printed_rows_is_left_out():
  rows = [(f"layer_{i}", "") for i in range(MOST)]
  assert "because of" in str(Example("module, because of", [("head", "a rule"), *rows]))
  assert "because of" not in str(Example("module, because of", [*rows, ("head", "a rule")]))


def test_reasons_of_a_wide_table_are_lines_above_their_rows():
  reasons = ["a reason that is long", "", "another one that is long"] * 3
  rows = [(f"{i}/{'a_long_name_' * 5}", why, str(i)) for i, why in enumerate(reasons)]
  lines = str(Example("module, because of, n", rows)).splitlines()
  found, reason = {}, ""
  for line in lines[2:]:
    if line.endswith(":"):
      reason = line.strip(" :").removeprefix("because of ")
    else:
      path, _ = line.split()
      found[path] = reason
  assert found == {path: why for path, why, _ in rows}
  assert len(lines) == 2 + len(rows) + 2


@pytest.mark.parametrize("width", [24, 40, 76])
@pytest.mark.parametrize(
  "rule",
  [
    mpjax.Rule("float32", path="/".join(f"a_long_name_{i}" for i in range(12))),
    mpjax.Rule("c=bf16", path=f"{'without_a_slash' * 10}, and words", rewrite=False),
    mpjax.Rule(None, path=re.compile("|".join(map(re.escape, ["a.b\n", "c\\d\"'"] * 20)), re.I)),
    mpjax.Rule(mpjax.Policy(precision="highest"), module=(nn.LayerNorm, nn.Dense, nn.Conv)),
    mpjax.Rule("float32", path=glob_of("a_name(with)[brackets]/" * 6 + "b")),
  ],
)
def test_a_rule_that_is_too_long_for_a_line_is_the_same_rule_on_several(rule, width):
  code = broken_rule(repr(rule), width)
  names = {"mpjax": mpjax, "re": re, "LayerNorm": nn.LayerNorm, "Dense": nn.Dense, "Conv": nn.Conv}
  assert eval(code, names) == rule
  text = str(Example("note", [(f"words {rule!r}, and more words",)]))
  (printed,) = printed_rules(text)
  assert eval(printed, names) == rule
  assert max(map(len, text.splitlines())) <= WIDTH
  if width == 76:
    assert max(map(len, code.splitlines())) <= width
