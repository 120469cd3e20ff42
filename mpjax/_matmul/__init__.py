"""Matmuls with derivative rules, and the recipes of formats such as float8."""
