"""What the partitioner makes of a program: which collectives, in which dtypes.

Read right after the pass that partitions. Later passes of the CPU backend widen half collectives to
float32, so that the final text says nothing about what another backend sends.
"""

import itertools
import pathlib
import re
import secrets
import tempfile
from typing import Any, NamedTuple

import jax

_COLLECTIVE = re.compile(
  r"= (?P<types>\(.*?\)|\S+) "
  r"(?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_TYPE = re.compile(r"(?P<dtype>[a-z]+\d+\w*|pred)\[(?P<shape>[\d,]*)\]")

_NUMBERS = itertools.count(secrets.randbelow(2**40))


class Collective(NamedTuple):
  """One array that the devices exchange: as XLA names it, with the shape that one device gets."""

  op: str
  dtype: str
  shape: tuple[int, ...]


def partitioned(fun: Any, *args: Any) -> str:
  """Returns the text of a program for one device, as the partitioner leaves it."""
  # The arguments are sharded over several devices, `jax.ShapeDtypeStruct` will do. One that is
  # closed over is a constant, which XLA may fold away.
  jitted = fun if hasattr(fun, "lower") else jax.jit(fun)
  with tempfile.TemporaryDirectory() as folder:
    # What was compiled before, in this run or an earlier one, would come from a cache and leave no
    # text: with another number for what only a GPU does, it is another program.
    options = {
      "xla_dump_to": folder,
      "xla_dump_hlo_pass_re": "spmd-partitioning",
      "xla_gpu_redzone_padding_bytes": next(_NUMBERS),
    }
    jitted.lower(*args).compile(compiler_options=options)
    found = sorted(pathlib.Path(folder).glob("*after_spmd-partitioning*.txt"))
    assert len(found) == 1, f"the partitioner ran {len(found)} times: are the arguments sharded?"
    return found[0].read_text(encoding="utf-8")


def collectives(fun: Any, *args: Any) -> list[Collective]:
  """Returns what the devices exchange in a program, in the order of its text."""
  return [
    Collective(match["op"], kind["dtype"], tuple(map(int, filter(None, kind["shape"].split(",")))))
    for match in _COLLECTIVE.finditer(partitioned(fun, *args))
    for kind in _TYPE.finditer(match["types"])
  ]
