"""A pytest plugin: runs each test inside a policy scope, and writes how each one ended.

python -m pytest -p tests.flax_suite.in_scope --scope=nothing --outcomes=out.json ...
"""

import contextlib
import json
import pathlib
from typing import Any

import pytest

import mpjax


def never(module: Any) -> bool:
  """A rule that could match any module, and matches none."""
  return False


SCOPES: dict[str, Any] = {
  "none": contextlib.nullcontext,
  # Casts nothing, and yet goes through everything.
  "nothing": lambda: mpjax.linen.policy_scope(
    None, [mpjax.Rule("float32", where=never)], unmatched="ignore"
  ),
  "mixed_bfloat16": lambda: mpjax.linen.policy_scope("mixed_bfloat16"),
  "mixed_float16": lambda: mpjax.linen.policy_scope("mixed_float16"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--scope", choices=SCOPES, default="none")
  parser.addoption("--outcomes", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  if config.getoption("--outcomes"):
    config.pluginmanager.register(Outcomes(config), "outcomes")


class Outcomes:
  """Enters the scope around each test and notes its outcome: passed, skipped or an exception."""

  def __init__(self, config: pytest.Config) -> None:
    self.scope = SCOPES[config.getoption("--scope")]
    self.path = config.getoption("--outcomes")
    self.outcomes: dict[str, dict[str, str]] = {}

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item: pytest.Item) -> Any:
    with self.scope():
      return (yield)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
      error = call.excinfo if report.failed else None
      self.outcomes[item.nodeid] = {
        "outcome": report.outcome,
        "error": "" if error is None else error.type.__name__,
        "text": "" if error is None else str(error.value)[-2000:],
      }
    return report

  def pytest_sessionfinish(self) -> None:
    self.path.write_text(json.dumps(self.outcomes, indent=1))
