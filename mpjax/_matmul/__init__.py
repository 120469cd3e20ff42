"""Matmuls with derivatives of their own, and the recipe of float8."""
