"""Policies, rules and dtypes, and which policy is active."""
