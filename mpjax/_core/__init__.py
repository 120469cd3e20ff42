"""Errors, trees, leaves and types: what everything else is built on."""
