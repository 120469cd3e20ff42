"""What the figures of `gpu_bench.py` say beside what is promised: tables for the terminal.

python benchmarks/gpu_ratios.py    writes the tables of docs/gpu_programs.md, from results/
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tables
from gpu_groups import milliseconds, rounds_of
from measure import Ratio, ratio, read, taken
from rich import box
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """How many times as long one version takes as another.

  Fields:
    title: the two in words.
    times: the version whose times are divided.
    by: the version whose times they are divided by.
    promised: bounds of the ratio by model, with "" for all models; none for those without.
    part: in which measurement both are.
  """

  title: str
  times: str
  by: str
  promised: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  part: str = "jax"


FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "gpu_programs.md"
RESULTS = FOLDER / "results"
TITLES = {
  "resnet": "ResNet-50",
  "gpt": "GPT",
  "wide": "GPT slice",
  "mlp": "MLP",
  "lstm": "LSTM",
  "after": "post-norm GPT",
  "experts": "8 experts",
}
COLUMNS = {
  **{"TF32": "TF32", "by hand": "by hand", "policy": "policy"},
  **{"dynamic": "dynamic scale", "float8": "float8"},
}
"""The versions that the page shows, with their headings."""
TORCH = {
  **{"torch float32 highest": "PyTorch float32", "torch TF32": "PyTorch TF32"},
  **{"torch amp": "PyTorch amp", "dynamic": "mpjax"},
}

NO_LIMIT = float("inf")
COMPARISONS = (
  Comparison(title="policy / by hand", times="policy", by="by hand", promised={"": (0.99, 1.01)}),
  Comparison(
    title="policy / by hand, float32 logits", times="policy", by="by hand, float32 logits",
    promised={"gpt": (0, 1.02)},
  ),
  Comparison(title="autocast / by hand", times="autocast", by="by hand"),
  Comparison(
    title="static scale / none", times="static", by="policy", promised={"": (0, 1.02)}
  ),
  Comparison(
    title="dynamic / static scale", times="dynamic", by="static", promised={"": (0, 1.01)}
  ),
  Comparison(title="flax DynamicScale / dynamic", times="flax DynamicScale", by="dynamic"),
  Comparison(
    title="float32 highest / policy", times="float32 highest", by="policy",
    promised={"resnet": (6.9, NO_LIMIT), "gpt": (10, NO_LIMIT)},
  ),
  Comparison(
    title="TF32 / policy", times="TF32", by="policy",
    promised={"resnet": (1.9, NO_LIMIT), "gpt": (3.1, NO_LIMIT), "lstm": (1.5, NO_LIMIT)},
  ),
  Comparison(
    title="policy / float8", times="policy", by="float8", promised={"mlp": (1.5, NO_LIMIT)}
  ),
  Comparison(
    title="PyTorch amp, compiled / dynamic", times="torch amp", by="dynamic", part="torch",
    promised={"resnet": (1.15, NO_LIMIT)},
  ),
  Comparison(
    title="PyTorch float32 highest / PyTorch amp", times="torch float32 highest", by="torch amp",
    part="torch",
  ),
  Comparison(
    title="PyTorch TF32 / PyTorch amp", times="torch TF32", by="torch amp", part="torch"
  ),
)  # fmt: skip
"""What the tables have, in their order, with the bounds that are promised."""


def compared(model: str, parts: Mapping[str, Any], one: Comparison) -> tuple[Ratio | None, str]:
  """Returns a ratio, or None and why there is none."""
  part = parts.get(one.part)
  if part is None:
    return None, "not measured"
  for name in (one.times, one.by):
    found = part["versions"].get(name, {"failed": part.get("missing", "not measured")})
    if "failed" in found:
      return None, f"not measured; {name}: {found['failed']}"
  times, by = (part["versions"][name] for name in (one.times, one.by))
  # A version that failed on its way has fewer rounds.
  rounds = min(len(times["seconds"]), len(by["seconds"]))
  if not rounds:
    return None, "not measured"
  return ratio(times["seconds"][:rounds], by["seconds"][:rounds]), ""


def promise(model: str, one: Comparison) -> tuple[float, float] | None:
  """Returns the bounds of a ratio for a model."""
  return one.promised.get(model, one.promised.get(""))


def bounds_text(bounds: tuple[float, float] | None) -> str:
  """Returns bounds as a table has them."""
  if bounds is None:
    return ""
  low, high = bounds
  if high == NO_LIMIT:
    return f"≥ {low:g}"
  return f"≤ {high:g}" if not low else f"{low:g} to {high:g}"


def verdict(found: Ratio, bounds: tuple[float, float] | None, suspicious: bool) -> str:
  """Returns whether a ratio is within its bounds."""
  if suspicious:
    return "suspicious losses"
  if bounds is None:
    return ""
  return "met" if bounds[0] <= found.median <= bounds[1] else "missed"


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
  """Yields model, comparison, figure, promise and verdict."""
  for model, each in results["models"].items():
    parts = each["parts"]
    for one in COMPARISONS:
      found, reason = compared(model, parts, one)
      # What is promised is promised of the sizes for a GPU.
      bounds = promise(model, one) if results["settings"]["size"] == "gpu" else None
      if found is None:
        yield model, one.title, reason, bounds_text(bounds), ""
        continue
      versions = parts[one.part]["versions"]
      suspicious = any(versions[name].get("suspicions") for name in (one.times, one.by))
      figure = f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f})"
      yield model, one.title, figure, bounds_text(bounds), verdict(found, bounds, suspicious)


def version_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
  """Yields model, version, milliseconds, temporaries, first loss and notes."""
  for model, each in results["models"].items():
    for part, found in each["parts"].items():
      if "missing" in found:
        yield (f"{model}, {each['half']}", "PyTorch", "", "", "", found["missing"])
      for name, one in found["versions"].items():
        # In the second part policy and dynamic are measured once more, beside PyTorch.
        title = name if part == "jax" or name.startswith("torch") else f"{name}, again"
        yield (f"{model}, {each['half']}", title, *_cells(one))


def _cells(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
  temporaries = f"{one['temp_bytes'] / 1e9:.2f}" if "temp_bytes" in one else ""
  if not one.get("seconds"):
    return "", temporaries, "", one.get("failed", "not measured")
  notes = list(one.get("suspicions", ()))
  notes += [one["failed"]] if "failed" in one else []
  if one.get("cudnn_attention"):
    notes.append("cuDNN attention")
  return f"{milliseconds(one):.2f}", temporaries, f"{one['losses'][0]:.4f}", "; ".join(notes)


def conditions(results: Mapping[str, Any]) -> str:
  """Returns under what the figures were taken, as a sentence."""
  how = results["settings"]
  parts = [part for each in results["models"].values() for part in each["parts"].values()]
  counts = sorted({rounds_of(part["versions"]) for part in parts if part.get("versions")})
  rounds = " or ".join(map(str, counts)) or how["rounds"]
  return (
    f"{taken(results['environment'])}; sizes {how['size']!r}, {rounds} rounds of at least "
    f"{how['seconds']} s; medians of the rounds."
  )


def _steps(models: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields the title and the figures of each model that is recorded."""
  for model, title in TITLES.items():
    if model in models:
      yield f"{title}, {models[model]['half']}", models[model]


def page_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
  """Yields a heading, then the milliseconds of each model, with their ratios to `by hand`."""
  yield "step, ms", *COLUMNS.values()
  for title, each in _steps(results["models"]):
    versions = each["parts"]["jax"]["versions"]
    yield title, *(_time(versions, name) for name in COLUMNS)


def _time(versions: Mapping[str, Any], name: str) -> str:
  one = versions.get(name, {})
  if not one.get("seconds"):
    return ""
  text = f"{milliseconds(one):.1f}"
  other = versions.get("by hand", {}).get("seconds", ())
  rounds = min(len(one["seconds"]), len(other))
  if name in ("by hand", "TF32") or not rounds:
    return text
  return f"{text} ({ratio(one['seconds'][:rounds], other[:rounds]).median:.3f})"


def memory_rows(recorded: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
  """Yields a heading, then the temporaries of each model on the last GPU that has it."""
  yield "GB of temporaries", *COLUMNS.values()
  models = {name: each for results in recorded for name, each in results["models"].items()}
  for title, each in _steps(models):
    versions = each["parts"]["jax"]["versions"]
    sizes = (versions.get(name, {}).get("temp_bytes") for name in COLUMNS)
    yield title, *("" if size is None else f"{size / 1e9:.2f}" for size in sizes)


def torch_rows(recorded: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
  """Yields a heading, then the milliseconds of PyTorch, and of mpjax in the same rounds."""
  yield "step, ms", *TORCH.values()
  for gpu, results in recorded.items():
    for title, each in _steps(results["models"]):
      versions = each["parts"].get("torch", {}).get("versions")
      if versions:
        yield f"{title}, {gpu}", *(f"{milliseconds(versions[x]):.1f}" for x in TORCH)


FIGURES = ("kernels", "bytes", "temp_bytes")


def compiled_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
  """Yields a heading, then a policy as ratios to dtypes by hand, and to exact sums."""
  yield "step", "kernels", "bytes moved", "temporaries"
  for title, each in _steps(results["models"]):
    policy, one, exact = (each["versions"][x] for x in ("policy", "by hand", "by hand, exact"))
    ratios = ((policy[key] / one[key], policy[key] / exact[key]) for key in FIGURES)
    yield title, *(f"{a:.3f} ({b:.3f})" for a, b in ratios)


SCALES = ("static scale", "dynamic scale", "flax DynamicScale")


def scaling_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
  """Yields a heading, then the kernels and bytes of steps with a loss scale, as ratios to none."""
  yield "step", *SCALES
  for title, each in _steps(results["models"]):
    versions = each["versions"]
    yield (
      title,
      *(
        ", ".join(f"{versions[name][key] / versions['policy'][key]:.3f}" for key in FIGURES[:2])
        for name in SCALES
      ),
    )


def updated(page: str) -> str:
  """Returns the text of the page with its tables made from what is recorded."""
  files = sorted((RESULTS / "gpu").glob("*.json"))
  recorded = {file.stem: read(file) for file in files}
  names = {stem: stem.split("_")[3].upper() for stem in recorded}
  for stem, results in recorded.items():
    text = f"{tables.table(list(page_rows(results)))}\n\n{conditions(results)}"
    page = tables.replaced(page, stem, text)
  made = {
    "memory": memory_rows(list(recorded.values())),
    "torch": torch_rows({names[stem]: results for stem, results in recorded.items()}),
    "compiled": compiled_rows(read(RESULTS / "gpu_hlo" / "h200_jax_0.10.json")),
    "scaling": scaling_rows(read(RESULTS / "gpu_steps" / "h200_float16_jax_0.10.json")),
  }
  for name, rows in made.items():
    page = tables.replaced(page, name, tables.table(list(rows)))
  return page


def show(results: Mapping[str, Any], console: Console) -> None:
  """Prints all tables."""
  headings = ("", "version", "ms a step", "GB temp", "first loss", "")
  console.print(_table("Steps", headings, (2, 3, 4), list(version_rows(results))))
  headings = ("", "ratio of times", "median (quartiles)", "promised", "")
  console.print(_table("Ratios", headings, (2, 3), list(rows(results))))
  console.print(conditions(results), highlight=False)


def _table(title: str, headings: Any, right: Any, lines: list[tuple[str, ...]]) -> Table:
  table = Table(title=title, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
  for i, heading in enumerate(headings):
    table.add_column(heading, justify="right" if i in right else "left", overflow="fold")
  before = None
  for line in lines:
    table.add_row(line[0] if line[0] != before else "", *line[1:])
    before = line[0]
  return table


if __name__ == "__main__":
  PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
