"""What JAX compiles while a test runs, read from its log: also in a process that has run for long.

`_cache_size()` of a jitted function is no such count. It is that of a cache which all functions
share: once that is full, JAX keeps no new entries, and says 0.
"""

import collections
import contextlib
import logging
import re
from collections.abc import Generator

import jax

COMPILED = re.compile(r"Finished XLA compilation of jit\((\w+)\)")


@contextlib.contextmanager
def compilations() -> Generator[collections.Counter[str]]:
  """Yields how often each jitted function is compiled inside, by its name."""
  found: collections.Counter[str] = collections.Counter()

  class Count(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
      found.update(COMPILED.findall(record.getMessage()))

  logger, count = logging.getLogger("jax"), Count()
  logger.addHandler(count)
  try:
    with jax.log_compiles():
      yield found
  finally:
    logger.removeHandler(count)
