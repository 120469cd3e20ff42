"""Policies for Flax Linen models, which stay unmodified.

>>> import flax.linen as nn, mpjax
>>> model = mpjax.with_policy(nn.Dense(2), "mixed_bfloat16")
"""

from mpjax.linen._policy_scope import policy_scope
from mpjax.linen._with_policy import PolicyModule, with_policy

__all__ = ["PolicyModule", "policy_scope", "with_policy"]
