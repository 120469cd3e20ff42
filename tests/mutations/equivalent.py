"""Generated mutants that compute the same as the code, each with the reason."""

EQUIVALENT: dict[str, str] = {}
"""Reasons by the name of the mutant."""
