"""Prints the versions that the tests run with, as a row of the table in docs/stability.md."""

import platform
from importlib.metadata import version

packages = ("jax", "flax", "optax")
print(" | ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]))
