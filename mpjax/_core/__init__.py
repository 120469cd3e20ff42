"""Errors, dtypes, trees, policies and rules: what everything else is built on."""
