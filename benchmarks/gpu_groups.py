"""Steps of a model in processes, and how they are measured one after the other.

What a version fails with (no memory, an operation that a GPU does not have, a process that dies) is
its figure, and the others go on.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measure
import workers

Figures = dict[str, dict[str, Any]]
Progress = Callable[[str], None]

COMPILED_BY_TORCH = "torch amp"
"""The version that `warm_up` compiles."""

LEAST_ROUNDS = 3
"""What is recorded where the time ends; with fewer a median says nothing."""

TOLERANCES = {"float8": 0.02, "torch": 0.03}
"""How far a first loss may be from float32's, relative to it; 0.01 for all others. PyTorch pads
some of a ResNet's convolutions on other sides."""


class Group:
  """Versions of a model in one process, which is started anew if one of them ends it."""

  def __init__(
    self,
    start: Callable[[], Any],
    names: Sequence[str],
    questions: Sequence[tuple[str, dict[str, Any]]],
    deadline: float,
    progress: Progress = lambda text: None,
  ) -> None:
    """Starts it and asks what prepares it; `ready` waits for the answers.

    Args:
      start: returns a new worker.
      names: of the versions that it holds.
      questions: what prepares it, in order. Their answers are found in `answers`.
      deadline: when to give up.
      progress: told what it does.
    """
    self.start, self.questions = start, list(questions)
    self.deadline, self.progress = deadline, progress
    self.figures: Figures = {name: {} for name in names}
    self.answers: dict[str, dict[str, Any]] = {}
    self._begin()

  def _begin(self) -> None:
    self.worker, self.closed = self.start(), False
    self.waiting: list[str] = []
    for question, arguments in self.questions:
      if question == "warm_up" and COMPILED_BY_TORCH not in self.alive:
        continue
      names = {"names": self.alive} if question == "trace" else {}
      self.worker.send(question, **arguments, **names)
      self.waiting.append(question)

  @property
  def alive(self) -> list[str]:
    """The versions that did not fail."""
    return [name for name, one in self.figures.items() if "failed" not in one]

  def ready(self, until: str | None = None) -> None:
    """Waits for the answers to the questions, or for those up to one of them."""
    while self.waiting and until not in self.answers:
      question = self.waiting.pop(0)
      try:
        answer = self.worker.receive(self.deadline, self.progress)
      except workers.WorkerEndedError as error:
        answer = {"failed": str(error)}
        self.waiting.clear()
      self.answers[question] = answer
      self._note(question, answer)
      if "failed" in answer and not self.waiting and question == "warm_up":
        self.close()
        self._begin()  # Without what ended it.

  def then(self, question: str) -> None:
    """Asks one more thing that prepares it, now and whenever it is started anew."""
    self.ready()
    self.questions = [*self.questions, (question, {})]
    if self.alive:
      self.worker.send(question)
      self.waiting.append(question)
      self.ready()

  def _note(self, question: str, answer: Mapping[str, Any]) -> None:
    if "failed" in answer:
      # What PyTorch does not compile is one version of three.
      lost = [COMPILED_BY_TORCH] if question == "warm_up" else self.alive
      self._fail(lost, answer["failed"])
    for name, reason in answer.get("failed_versions", {}).items():
      self._fail([name], reason)
    if question == "compile" and "failed" not in answer:
      for name, found in answer.items():
        self.figures[name] |= found
    if question == "warm_up" and "failed" not in answer:
      self.figures[COMPILED_BY_TORCH] |= answer

  def _fail(self, names: Sequence[str], reason: str) -> None:
    for name in names:
      self.figures[name]["failed"] = reason

  def ask(self, question: str, name: str, **arguments: Any) -> dict[str, Any] | None:
    """Returns the answer about a version; None if it failed, which is noted."""
    try:
      answer = self.worker.ask(self.deadline, question, name=name, **arguments)
      if "failed" not in answer:
        return answer
      self._fail([name], answer["failed"])
      self.worker.ask(self.deadline, "drop", name=name)
    except workers.WorkerEndedError as error:
      self._fail([name], str(error))
      self.close()
      if self.alive:
        self._begin()
        self.ready()
    return None

  def close(self) -> None:
    """Ends the process, once."""
    if not self.closed:
      self.closed = True
      self.worker.close()


def take_turns(
  groups: Sequence[Group], rounds: int, seconds: float, progress: Progress = lambda text: None
) -> Figures:
  """Returns figures of all versions of several groups.

  Args:
    groups: with names that differ.
    rounds: how many measurements of each version; fewer where the time ends before.
    seconds: the least length of a measurement.
    progress: told what is measured.

  Raises:
    OutOfTimeError: not even `LEAST_ROUNDS` are complete.
  """
  of = {name: group for group in groups for name in group.figures}
  # The most memory first: once it is there in one piece, what needs less has a place in it.
  by_memory = sorted(of, key=lambda name: -of[name].figures[name].get("temp_bytes", 0))
  repeats = {}
  for name in by_memory:
    progress(f"check {name}")
    if name not in of[name].alive:
      continue
    found = of[name].ask("check", name)
    if found is not None:
      repeats[name] = min(200, max(1, round(seconds / max(found["seconds"], 1e-6))))
      of[name].figures[name] |= {"losses": found["losses"], "seconds": [], "finite": True}
  names = [name for name in of if name in repeats]
  try:
    for name in itertools.chain(*measure.orders(names, rounds)) if names else ():
      progress(f"measure {name}")
      if name not in of[name].alive:
        continue
      found = of[name].ask("measure", name, repeats=repeats[name])
      if found is not None:
        of[name].figures[name]["seconds"].append(found["seconds"])
        of[name].figures[name]["finite"] &= found["finite"]
  except workers.OutOfTimeError:
    measured = [of[name].figures[name]["seconds"] for name in names if name in of[name].alive]
    complete = min(map(len, measured), default=0)
    if complete < LEAST_ROUNDS:
      raise
    for each in measured:
      del each[complete:]
  return {name: group.figures[name] for name, group in of.items()}


def suspicions(figures: Figures, reference: Sequence[float] | None) -> dict[str, list[str]]:
  """Returns what is wrong with the losses of each version.

  Args:
    figures: of `take_turns`.
    reference: losses of the first steps in float32.
  """
  found: dict[str, list[str]] = {}
  for name, one in figures.items():
    losses = one.get("losses")
    if losses is None:
      continue
    what = found[name] = []
    if not one["finite"] or any(x != x or abs(x) == float("inf") for x in losses):
      what.append("a loss is not finite")
    elif reference is not None:
      tolerance = next((x for key, x in TOLERANCES.items() if name.startswith(key)), 0.01)
      allowed = tolerance * abs(reference[0])
      if abs(losses[0] - reference[0]) > allowed:
        what.append(f"the first loss is {losses[0]:.4g}, in float32 {reference[0]:.4g}")
      # A step that a loss scale skips learns nothing; one of broken gradients never does.
      learned, wanted = losses[0] - losses[-1], reference[0] - reference[-1]
      if learned < 0.25 * wanted - allowed:
        what.append(f"the loss fell by {learned:.3g}, in float32 by {wanted:.3g}")
  return {name: what for name, what in found.items() if what}


def rounds_of(figures: Figures) -> int:
  """Returns how many rounds are complete: fewer than were asked for where the time ended."""
  each = [len(one["seconds"]) for one in figures.values() if "failed" not in one]
  return min(each, default=0)


def milliseconds(one: Mapping[str, Any]) -> float:
  """Returns the median of a step."""
  return 1e3 * statistics.median(one["seconds"])
