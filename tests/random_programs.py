"""Random programs of JAX, which are printed as the Python that they run.

A program is a list of lines such as `r3 = jnp.tanh(r2)`. The first letter of a name is its shape,
see `SHAPES`. Every program takes the inputs in `INPUTS` and the parameters in `PARAMETERS`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

SHAPES = {"r": (4, 8), "s": (8, 8), "v": (8,), "c": (4,), "n": ()}
"""Rows, square matrices, vectors, columns and numbers."""

INPUTS = ("rx", "cx")
PARAMETERS = ("sw", "su", "vb", "nb")


def _array(name: str, seed: int) -> jax.Array:
  numbers = np.random.default_rng(seed).normal(size=SHAPES[name[0]])
  scale = 0.4 if name[0] == "s" else 1.0
  return jnp.asarray(scale * numbers, jnp.float32)


DATA = {name: _array(name, seed) for seed, name in enumerate(INPUTS)}
PARAMS = {name: _array(name, 10 + seed) for seed, name in enumerate(PARAMETERS)}

JAX_TABLE = _array("s", 20)
NUMPY_TABLE = np.asarray(_array("v", 21))


# Functions with a jaxpr inside, called by name in a line.


def scan_rows(h: Any, w: Any) -> Any:
  """A recurrent layer over the rows."""

  def step(state, row):
    state = jnp.tanh(state @ w + row)
    return state, state

  return lax.scan(step, jnp.zeros(8), h)[1]


def scan_sum(h: Any) -> Any:
  """A running sum, which the carry holds."""
  return lax.scan(lambda total, row: (total + 0.3 * row, total), jnp.zeros(8), h)[1]


def fori(h: Any, w: Any) -> Any:
  return lax.fori_loop(0, 2, lambda _, h: jax.nn.relu(h @ w) + 0.1, h)


def while_loop(h: Any, w: Any) -> Any:
  """A loop that counts to two."""
  body = lambda state: (state[0] + 1, jnp.tanh(state[1] @ w))  # noqa: E731
  return lax.while_loop(lambda state: state[0] < 2, body, (0, h))[1]


def branch(number: Any, one: Any, other: Any) -> Any:
  return lax.cond(number > 0, lambda a, b: jnp.tanh(a) * 2, lambda a, b: a - b, one, other)


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
  return jnp.log1p(jnp.square(x))


@with_jvp.defjvp
def _with_jvp(primals: Any, tangents: Any) -> Any:
  (x,), (dx,) = primals, tangents
  return with_jvp(x), 2 * x / (1 + jnp.square(x)) * dx


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
  return jnp.tanh(x) * x


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, cotangent: (cotangent * jnp.tanh(x),))


@jax.jit
def in_jit(h: Any, bias: Any) -> Any:
  return jax.nn.sigmoid(h + bias) * 2


@jax.jit
def scaled_in_jit(h: Any, factor: Any) -> Any:
  return jnp.where(h > 0, h, factor * h)


@jax.checkpoint
def recomputed(h: Any, w: Any) -> Any:
  return jax.nn.gelu(h @ w) @ w


def layer_norm(h: Any) -> Any:
  centered = h - jnp.mean(h, -1, keepdims=True)
  return centered * lax.rsqrt(jnp.mean(jnp.square(centered), -1, keepdims=True) + 1e-6)


def solve(matrix: Any, vector: Any) -> Any:
  return jnp.linalg.solve(8 * jnp.eye(8) + jnp.tanh(matrix), vector)


_NAMES = {
  **{"jax": jax, "jnp": jnp, "np": np, "lax": lax},
  **{"JAX_TABLE": JAX_TABLE, "NUMPY_TABLE": NUMPY_TABLE},
  **{
    f.__name__: f
    for f in (scan_rows, scan_sum, fori, while_loop, branch, in_jit, scaled_in_jit, recomputed)
  },
  **{"layer_norm": layer_norm, "solve": solve, "with_jvp": with_jvp, "with_vjp": with_vjp},
}


# What a line may be.


class Template(NamedTuple):
  """The text of a line; `{r}` is a name of rows, `{r2}` another; `{a}` and `{a2}` are alike."""

  text: str
  result: str  # the letter of its shape, "a" for that of the operand


def _templates(result: str, lines: str) -> tuple[Template, ...]:
  return tuple(Template(text.strip(), result) for text in lines.strip().splitlines())


MATMULS = (
  *_templates(
    "r",
    """
    {r} @ {s}
    {r} @ {s}.T
    ({r} @ {r2}.T) @ {r}
    jax.nn.one_hot(jnp.argmax({r}, -1), 8) @ {s}
    """,
  ),
  *_templates("s", "{s} @ {s2}\n{s} @ {s}.T\n{r}.T @ {r2}"),
  *_templates("c", "{r} @ {v}"),
  *_templates("v", "{v} @ {s}\n{c} @ {r}"),
)

ARITHMETIC = (
  *_templates(
    "a",
    """
    {a} + {a2}
    {a} - {a2}
    {a} * {a2}
    {a} + 0.1
    1.0 - {a}
    {a} * 0.3
    -{a}
    {a} / (1.5 + jnp.abs({a2}))
    jnp.tanh({a})
    jax.nn.sigmoid({a})
    lax.erf({a})
    jax.nn.gelu({a})
    jax.nn.relu({a})
    jax.nn.leaky_relu({a})
    jnp.square({a})
    jnp.sqrt(jnp.abs({a}) + 1e-3)
    """,
  ),
  *_templates("r", "{r} + {v}\n{r} * {v}\n{r} * {c}[:, None]\n{r} + {n}\n{c}[:, None] * {v}"),
)

FLOAT32 = (
  *_templates(
    "a",
    """
    jnp.exp(-jnp.abs({a}))
    jnp.log1p(jnp.abs({a}))
    jnp.sin({a})
    jnp.cos({a})
    """,
  ),
  *_templates("r", "jax.nn.softmax({r})\njax.nn.log_softmax({r})\nlayer_norm({r})"),
  *_templates("v", "jnp.mean({r}, 0)\nsolve({s}, {v})"),
  *_templates("c", "jnp.sum({r}, -1)\njax.nn.logsumexp({r}, -1)\njnp.linalg.norm({r}, axis=-1)"),
  *_templates("n", "jnp.mean({r})\n{v} @ {v2}"),
)

CHOICES = (
  *_templates(
    "a",
    """
    jnp.floor({a})
    jnp.maximum({a}, {a2})
    jnp.where({a} > {a2}, {a}, {a2})
    jnp.where({a} > 0, {a}, -1e9)
    ({a} > {a2}).astype(jnp.float32)
    {a} * ({a2} > 0)
    ({a} > 0) * 1.
    """,
  ),
  *_templates(
    "r",
    """
    jnp.sort({r}, -1)
    jax.nn.one_hot(jnp.argmin({r}, -1), 8)
    {s}[jnp.argmin({r}, -1)]
    jnp.argsort({r}, -1).astype(jnp.float32)
    """,
  ),
  *_templates("v", "jnp.take({r}, jnp.argmax({c}), 0)"),
  *_templates("c", "jnp.max({r}, -1)\nlax.top_k({v}, 4)[0]"),
)

MOVES = (
  *_templates(
    "r", "{r}[::-1]\n{r}.reshape(8, 4).T\njnp.concatenate([{r}[:2], {r2}[2:]])\n{s}[2:6]"
  ),
  *_templates("a", "lax.stop_gradient({a})"),
)

CONSTANTS = (
  *_templates("r", "jax.random.normal(jax.random.key(1), (4, 8))\njnp.ones((4, 8))"),
  *_templates("s", "JAX_TABLE\njnp.eye(8)"),
  *_templates("v", "NUMPY_TABLE\njnp.arange(8.)"),
)

CALLS = (
  *_templates("a", "with_jvp({a})\nwith_vjp({a})\nbranch({n}, {a}, {a2})\nscaled_in_jit({a}, 0.1)"),
  *_templates("r", "in_jit({r}, {v})\nrecomputed({r}, {s})\nfori({r}, {s})\nscan_rows({r}, {s})"),
  *_templates("r", "while_loop({r}, {s})\nscan_sum({r})"),
)

TEMPLATES = (*MATMULS, *ARITHMETIC, *FLOAT32, *CHOICES, *MOVES, *CONSTANTS, *CALLS)
"""What a program is made of; hypothesis shrinks towards the first."""

CONSUMERS = (*FLOAT32, *ARITHMETIC, *CHOICES, *CALLS, *MATMULS)
"""What may be appended to a program."""

_SLOT = re.compile(r"\{(\w)2?\}")
_NAME = re.compile(r"\b[rsvcn](?:\d+|[xwub])\b")


# Programs.


class Line(NamedTuple):
  """One line: `name = text`."""

  name: str
  text: str

  @property
  def operands(self) -> set[str]:
    """The names that it uses."""
    return set(_NAME.findall(self.text))


@dataclasses.dataclass(frozen=True)
class Program:
  """A function of inputs and parameters, both dicts of arrays."""

  lines: tuple[Line, ...]
  outputs: tuple[str, ...]

  def __call__(self, data: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
    env = run_lines(self.lines, {**data, **params})
    return tuple(env[name] for name in self.outputs)

  def __repr__(self) -> str:
    lines = [f"{line.name} = {line.text}" for line in self.lines]
    text = "\n  ".join([*lines, f"return {', '.join(self.outputs)},"])
    return f"\ndef program({', '.join((*INPUTS, *PARAMETERS))}):\n  {text}\n"

  @property
  def names(self) -> tuple[str, ...]:
    """The arguments and the results of all lines."""
    return (*INPUTS, *PARAMETERS, *(line.name for line in self.lines))

  @property
  def differentiable(self) -> bool:
    """Whether JAX can differentiate it in reverse."""
    return not any("while_loop" in line.text for line in self.lines)

  def pruned(self) -> "Program":
    """Returns the program without the lines that no output needs."""
    needed, lines = set(self.outputs), list[Line]()
    for line in reversed(self.lines):
      if line.name in needed:
        lines.insert(0, line)
        needed |= line.operands
    return Program(tuple(lines), self.outputs)

  def plus(self, lines: tuple[Line, ...], outputs: tuple[str, ...]) -> "Program":
    """Returns the program with more lines and outputs at its end."""
    return Program(self.lines + lines, self.outputs + outputs)

  def with_part(self, start: int, stop: int, wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the program with some of its lines in a function of their own, wrapped."""
    part, rest = self.lines[start:stop], self.lines[stop:]
    made = {line.name for line in part}
    used = set().union(*(line.operands for line in rest), self.outputs)
    returned = sorted(made & used)
    taken = sorted(set().union(*(line.operands for line in part)) - made)

    def inner(*operands):
      env = run_lines(part, dict(zip(taken, operands, strict=True)))
      return [env[name] for name in returned]

    def outer(data, params):
      env = run_lines(self.lines[:start], {**data, **params})
      env |= zip(returned, wrap(inner)(*(env[name] for name in taken)), strict=True)
      env = run_lines(rest, env)
      return tuple(env[name] for name in self.outputs)

    return outer


def run_lines(lines: tuple[Line, ...], env: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `env` with the result of each line."""
  env = dict(env)
  for line in lines:
    env[line.name] = eval(_compiled(line.text), _NAMES, env)
  return env


@functools.cache
def _compiled(text: str) -> Any:
  return compile(text, text, "eval")


def program(text: str) -> Program:
  """Returns the program of some lines, the last of which is `return` and names."""
  *lines, last = (line.strip() for line in text.strip().splitlines())
  outputs = last.removeprefix("return").replace(" ", "").strip(",").split(",")
  parts = (line.split(" = ", 1) for line in lines)
  return Program(tuple(Line(name, code) for name, code in parts), tuple(outputs))


# Strategies.

Draw = tuple[int, tuple[int, int, int, int]]
"""The number of a template, and which names are taken for the shape of the line and its slots."""


def _line(number: int, draw: Draw, templates: tuple[Template, ...], names: list[str]) -> Line:
  text, result = templates[draw[0] % len(templates)]
  picks: Iterator[int] = iter(draw[1])
  # A template for any shape takes that of a recent value.
  recent = names[-1 - next(picks) % len(names)][0] if "{a}" in text else ""

  def pick(slot: re.Match[str]) -> str:
    letter = recent if slot[1] == "a" else slot[1]
    fitting = [name for name in names if name[0] == letter]
    if slot[0].endswith("2}"):
      return fitting[-1 - next(picks) % len(fitting)]
    if letter not in chosen:
      chosen[letter] = fitting[-1 - next(picks) % len(fitting)]
    return chosen[letter]

  chosen: dict[str, str] = {}
  return Line(f"{recent or result}{number}", _SLOT.sub(pick, text))


def lines_of(
  draws: list[Draw], templates: tuple[Template, ...], names: tuple[str, ...], first: int
) -> tuple[Line, ...]:
  """Returns a line for each draw; each may use the lines before it."""
  known, lines = list(names), list[Line]()
  for number, draw in enumerate(draws, first):
    lines.append(_line(number, draw, templates, known))
    known.append(lines[-1].name)
  return tuple(lines)


# Mostly the last value that fits, so that lines are long chains.
_PICKS = st.tuples(*[st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3, 5, 7))] * 4)


def _draws(templates: tuple[Template, ...], least: int, most: int) -> st.SearchStrategy[list[Draw]]:
  draw = st.tuples(st.integers(0, len(templates) - 1), _PICKS)
  return st.lists(draw, min_size=least, max_size=most)


@st.composite
def programs(draw: Any, most: int = 12) -> Program:
  """Draws a program in which every line is needed."""
  lines = lines_of(draw(_draws(TEMPLATES, 3, most)), TEMPLATES, (*INPUTS, *PARAMETERS), 1)
  # The first matmul makes activations, without which nothing is rounded.
  lines = (Line("r0", "rx @ sw"), *lines)
  lines = tuple(_after_first(line) for line in lines)
  others = draw(st.lists(st.integers(0, len(lines) - 1), max_size=3))
  outputs = dict.fromkeys([lines[-1].name, *(lines[i].name for i in others)])
  return Program(lines, tuple(outputs)).pruned()


def _after_first(line: Line) -> Line:
  """Returns a line that uses the result of the first matmul where it drew the input."""
  if line.name == "r0" or int(line.name[1:]) % 3 == 0:
    return line
  return Line(line.name, re.sub(r"\brx\b", "r0", line.text))


@st.composite
def extensions(draw: Any) -> tuple[Program, Program]:
  """Draws a program, and the same with more consumers and outputs at its end."""
  before = draw(programs())
  values = tuple(line.name for line in before.lines)
  # Arguments come first, so that most picks are values of the program.
  draws = draw(_draws(CONSUMERS, 0, 3))
  lines = lines_of(draws, CONSUMERS, before.names, 100)
  least = 0 if lines else 1
  more = draw(st.lists(st.sampled_from(values), min_size=least, max_size=2, unique=True))
  return before, before.plus(lines, (*(line.name for line in lines), *more))


@st.composite
def parts(draw: Any) -> tuple[Program, int, int]:
  """Draws a program, and the first and last line of a part of it."""
  whole = draw(programs())
  start = draw(st.integers(0, len(whole.lines) - 1))
  return whole, start, draw(st.integers(start + 1, len(whole.lines)))
