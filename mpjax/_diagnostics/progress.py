"""Progress of what takes longer than two seconds: a bar, or in a log a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator

from rich.console import Console

FIRST, EVERY, REDRAWN = 2.0, 5.0, 0.2
"""Seconds until something is shown, between the lines of a log, and until a bar is drawn again."""

_BAR = 30


@contextlib.contextmanager
def progress(task: str) -> Generator[Callable[[int, int], None]]:
  """Shows on stderr that a task runs, and what part of it is done."""
  # Yields a function to call with the number of steps that are done, and of all, if that is known.
  is_line = sys.stderr.isatty() or Console(stderr=True).is_jupyter
  ended, start, done, total = threading.Event(), time.monotonic(), 0, 0

  def advance(steps: int, of: int) -> None:
    nonlocal done, total
    done, total = steps, of

  def show() -> None:
    wait, text = FIRST, ""
    while not ended.wait(wait):
      wait = REDRAWN if is_line else EVERY
      bar, share = "", f" {done} of {total}," if total else ""
      if is_line and total:
        bar = f" {'━' * min(_BAR * done // total, _BAR):{_BAR}}"
      text = f"{task}:{bar}{share} {time.monotonic() - start:.0f} s"
      sys.stderr.write(f"\r{text}" if is_line else f"{text}\n")
      sys.stderr.flush()
    if is_line and text:
      sys.stderr.write(f"\r{' ' * len(text)}\r")
      sys.stderr.flush()

  thread = threading.Thread(target=show, daemon=True)
  thread.start()
  try:
    yield advance
  finally:
    ended.set()
    thread.join()
