"""Tests of Linen modules under a policy."""
