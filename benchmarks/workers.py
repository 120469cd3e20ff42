"""Processes that hold a model's compiled steps, and answer questions about them line by line.

A process of its own for JAX and for PyTorch: each gives its memory back to the GPU by ending, needs
not share CUDA's libraries with the other, and takes nothing else down with it. Questions and
answers are JSON, a line each.
"""

import collections
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
OUT_OF_MEMORY = "out of memory"
"""What is said of a version that needs more memory than there is, whoever noticed it."""


class WorkerEndedError(RuntimeError):
  """The process is gone, or gave no answer in time."""


class OutOfTimeError(RuntimeError):
  """The time for all measurements is used up."""


class Worker:
  """A process that was started, and the questions to it."""

  def __init__(self, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
    """Starts it.

    Args:
      command: the interpreter, the script and its arguments.
      environment: what differs from this process; None removes a variable.
    """
    whole = {**os.environ, **environment}
    paths = [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    whole["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    self.process = subprocess.Popen(
      list(command),
      env={name: value for name, value in whole.items() if value is not None},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
    self.last_words: collections.deque[str] = collections.deque(maxlen=20)
    reads = (self._read_answers, self._read_errors)
    self.readers = [threading.Thread(target=read, daemon=True) for read in reads]
    for reader in self.readers:
      reader.start()

  def _read_answers(self) -> None:
    for line in self.process.stdout or ():
      try:
        self.answers.put(json.loads(line))
      except ValueError:  # Printed by a library, before `serve` had taken its place.
        self.last_words.append(line.rstrip())
    self.answers.put(None)

  def _read_errors(self) -> None:
    for line in self.process.stderr or ():
      if line.strip():
        self.last_words.append(line.rstrip())

  def send(self, question: str, **arguments: Any) -> None:
    """Asks without waiting for the answer."""
    with contextlib.suppress(BrokenPipeError):  # It is gone: `receive` says so, and how.
      assert self.process.stdin is not None
      self.process.stdin.write(json.dumps({"do": question, **arguments}) + "\n")
      self.process.stdin.flush()

  def receive(
    self, deadline: float, progress: Callable[[str], None] = lambda text: None
  ) -> dict[str, Any]:
    """Waits for the answer to the oldest question.

    Args:
      deadline: in seconds of `time.monotonic`.
      progress: called with what the worker says before its answer.

    Raises:
      OutOfTimeError: the deadline passed.
      WorkerEndedError: it is gone.
    """
    while True:
      try:
        answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
      except queue.Empty:
        raise OutOfTimeError from None
      if answer is None:
        self.answers.put(None)  # For the next question.
        raise WorkerEndedError(self._how_it_ended())
      if "progress" not in answer:
        return answer
      progress(answer["progress"])

  def ask(self, deadline: float, question: str, **arguments: Any) -> dict[str, Any]:
    """Asks and waits."""
    self.send(question, **arguments)
    return self.receive(deadline)

  def _how_it_ended(self) -> str:
    try:
      code = self.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
      return "it closed its output"
    time.sleep(0.1)  # Its last words are read by another thread.
    said = next((x for x in reversed(self.last_words) if not x.startswith(" ")), "no message")
    return f"the process ended with {code}: {said[:200]}"

  def close(self) -> None:
    """Ends it; what it held on the GPU is free afterwards."""
    with contextlib.suppress(BrokenPipeError):
      if self.process.stdin is not None:
        self.process.stdin.close()
    try:
      self.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()
    for reader in self.readers:
      reader.join(timeout=5)
    for pipe in (self.process.stdout, self.process.stderr):
      if pipe is not None:
        pipe.close()


def serve(answers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
  """Answers questions from standard input; the process ends when that is closed.

  It ends at once, whatever it is doing: if who asks was killed, the GPU is free again. Whatever
  else is printed goes to standard error. An exception is an answer, `{"failed": why}`.
  """
  global _output
  _output = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
  threading.Thread(target=_read_questions, args=(questions,), daemon=True).start()
  while True:
    question = questions.get()
    try:
      answer = answers[question.pop("do")](**question)
    except Exception as error:
      answer = {"failed": why(error)}
    _write(answer)


def _read_questions(questions: queue.SimpleQueue[dict[str, Any]]) -> None:
  for line in sys.stdin:
    questions.put(json.loads(line))
  os._exit(0)


_output: Any = None


def say(text: str) -> None:
  """Tells who asked how far the answer is."""
  if _output is not None:
    _write({"progress": text})


def _write(answer: Mapping[str, Any]) -> None:
  _output.write(json.dumps(answer) + "\n")
  _output.flush()


def why(error: BaseException) -> str:
  """Returns why something failed, in a line."""
  text = f"{type(error).__name__}: {error}"
  if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
    return OUT_OF_MEMORY
  return text.strip().splitlines()[0][:300]
