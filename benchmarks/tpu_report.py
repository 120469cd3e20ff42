"""Writes the tables of docs/tpu_programs.md from what `tpu_hlo.py` has recorded.

python benchmarks/tpu_report.py           writes the tables of the page
python benchmarks/tpu_report.py --show    prints every recorded figure
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tables
from measure import read
from tpu_hlo import GIGA, VERSIONS

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "results" / "tpu_hlo"
PAGE = FOLDER.parent / "docs" / "tpu_programs.md"

MODELS = {
  "gpt": "GPT, 8 layers of width 1024, causal, batch 8",
  "encoder": "the same without a mask",
  "embedded": "the GPT with places of nn.Embed",
  "moe": "MoE, the GPT with 8 experts each",
  "mlp": "large MLP, width 8192, batch 8192",
  "resnet": "ResNet-50, batch 64",
}
BASES = {
  **dict.fromkeys(("dynamic scale", "flax DynamicScale", "masters", "float32 head"), "policy"),
  "split masters": "masters",
  "masters, dynamic": "masters",
}
"""What a version is compared with; if not here, with `by hand`."""
AT_MOST = {"policy": 1.0, "dynamic scale": 1.03}
"""Bounds of ratios to two digits: those of these figures, of every model but ResNet-50."""


def bound(model: str, name: str) -> float | None:
  """Returns what the ratios of a version may be at most; None without a bound."""
  return 1.01 if (model, name) == ("resnet", "policy") else AT_MOST.get(name)


def recorded() -> dict[str, Any]:
  """Returns what is recorded, by chip, and of many chips."""
  files = sorted(RECORDED.glob("*.json"))
  return {file.stem: read(file) for file in files}


def base_of(versions: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
  """Returns the figures that a version is compared with; None for itself, or without any."""
  base = BASES.get(name, "by hand")
  found = versions.get(base)
  return None if base == name or found is None or "error" in found else found


def ratio(versions: Mapping[str, Any], name: str, key: str) -> float | None:
  """Returns a figure of a version, divided by that of what it is compared with."""
  base = base_of(versions, name)
  return versions[name][key] / base[key] if base else None


def exceeded(results: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
  """Returns the ratios of one chip that are above their bounds, by model, version and figure."""
  found = {}
  for model, each in results["models"].items():
    for name in each["versions"]:
      most = bound(model, name)
      if most is None or base_of(each["versions"], name) is None:
        continue
      ratios = {key: ratio(each["versions"], name, key) for key in GIGA.values()}
      found |= {(model, name, key): x for key, x in ratios.items() if x and round(x, 2) > most}
  return found


def chip(results: Mapping[str, Any], order: Sequence[str]) -> str:
  """Returns the table of one chip, versions in an order."""
  rows = [["step", *GIGA, "fusions", "TFLOP"]]
  for model, words in MODELS.items():
    versions = results["models"].get(model, {"versions": {}})["versions"]
    names = [name for name in order if name in versions]
    for name in names:
      one = versions[name]
      row = [f"{words}: {name}" if name == names[0] else name]
      if "error" in one:
        rows.append([*row, "does not fit", *[""] * (len(rows[0]) - 2)])
        continue
      for key in GIGA.values():
        compared = ratio(versions, name, key)
        row.append(f"{one[key] / 1e9:.2f}" + (f" ({compared:.3f})" if compared else ""))
        if (model, name, key) in exceeded(results):
          row[-1] = f"**{row[-1]}**"
      rows.append([*row, str(one["fusions"]), f"{sum(one['flops'].values()) / 1e12:.2f}"])
  return tables.table(rows)


KINDS = {
  "gathered": ("all-gather",),
  "reduced": ("all-reduce", "reduce-scatter"),
  "exchanged": ("all-to-all", "collective-permute"),
}


def travels(figures: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
  """Returns how often something travels in collectives of some kinds, and its bytes, by dtype."""
  found: dict[str, tuple[int, int]] = {}
  for name, (count, size) in figures["collectives"].items():
    kind, dtype = name.split()
    if kind in kinds:
      counted, sized = found.get(dtype, (0, 0))
      found[dtype] = counted + count, sized + size
  return found


def total(figures: Mapping[str, Any]) -> int:
  """Returns the bytes of all collectives."""
  return sum(size for _, size in figures["collectives"].values())


def pods(results: Mapping[str, Any], order: Sequence[str]) -> str:
  """Returns the table of programs for many chips, versions in an order."""
  giga = {"GB accessed": "traffic_bytes", "GB temporary": "temp_bytes"}
  rows = [["step", *(f"MB {x}" for x in KINDS), "MB in all", *giga, "kernels", "MB of text"]]
  for model, each in results["models"].items():
    names = [name for name in order if name in each["versions"]]
    for name in names:
      one, base = each["versions"][name], base_of(each["versions"], name)
      moved = [travels(one, kinds) for kinds in KINDS.values()]
      shown = [
        ", ".join(f"{d} {size / 1e6:.0f} ({n})" for d, (n, size) in sorted(x.items()))
        for x in moved
      ]
      shown.append(
        f"{total(one) / 1e6:.0f}" + (f" ({total(one) / total(base):.3f})" if base else "")
      )
      for key in giga.values():
        shown.append(f"{one[key] / 1e9:.2f}" + (f" ({one[key] / base[key]:.3f})" if base else ""))
      text = f"{one['text_bytes'] / 1e6:.2f}"
      first = f"{model}: {name}" if name == names[0] else name
      rows.append([first, *shown, str(one["kernels"]), text])
  return tables.table(rows)


TITLES = {
  **{"gpt": "GPT", "encoder": "GPT without a mask", "embedded": "GPT, `nn.Embed` positions"},
  **{"moe": "MoE", "mlp": "MLP", "resnet": "ResNet-50"},
}
SHOWN = ("traffic_bytes", "temp_bytes")


def _ratios(versions: Mapping[str, Any], name: str) -> str:
  """Returns the bytes accessed and the temporaries of a version, divided by those by hand."""
  if name not in versions:
    return ""
  one, base = versions[name], versions["by hand"]
  return ", ".join(f"{one[key] / base[key]:.3f}" for key in SHOWN)


def chips(results: Mapping[str, Any]) -> str:
  """Returns the table of a policy, with and without a scale, on each chip."""
  rows = [["step", "chip", "policy", "dynamic scale"]]
  for model, title in TITLES.items():
    for name, each in results.items():
      versions = each["models"].get(model, {}).get("versions")
      if versions:
        rows.append([title, name, *(_ratios(versions, x) for x in rows[0][2:])])
        title = ""
  return tables.table(rows, 2)


LARGER_PODS = ("64 chips", "256 chips")
"""Titles of programs whose ratios are close to those of 16 chips; `--show` has them."""


def many(results: Sequence[Mapping[str, Any]]) -> str:
  """Returns the table of a policy on many chips: what is sent, accessed, and temporaries."""
  rows = [["step", "MB sent by hand", "sent", "accessed", "temporaries"]]
  for models in (each["models"] for each in results):
    for title, each in models.items():
      if title.endswith(LARGER_PODS):
        continue
      one, base = each["versions"]["policy"], each["versions"]["by hand"]
      ratios = (total(one) / total(base), *(one[key] / base[key] for key in SHOWN))
      rows.append([title, f"{total(base) / 1e6:.0f}", *(f"{x:.3f}" for x in ratios)])
  return tables.table(rows)


MANY = ("pods", "h200")
"""The records of programs for many chips."""


def updated(page: str, results: Mapping[str, Any]) -> str:
  """Returns the text of the page with its tables made from what is recorded."""
  alone = {name: each for name, each in results.items() if name not in MANY}
  page = tables.replaced(page, "chips", chips(alone))
  return tables.replaced(page, "pods", many([results[name] for name in MANY]))


def everything(results: Mapping[str, Any], order: Sequence[str]) -> str:
  """Returns all that is recorded, a table for each chip."""
  made = {name: pods if name in MANY else chip for name in results}
  return "\n\n".join(f"{name}:\n\n{made[name](results[name], order)}" for name in results)


if __name__ == "__main__":
  if "--show" in sys.argv:
    print(everything(recorded(), VERSIONS))
  else:
    text = updated(PAGE.read_text(encoding="utf-8"), recorded())
    PAGE.write_text(text, encoding="utf-8")
