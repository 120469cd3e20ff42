"""What an audit is told while it traces."""

import jax
import jax.numpy as jnp

from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditedModule, AuditRecord
from mpjax._policy.rules import Rule


def test_a_rule_counts_modules_and_not_calls():
  record, rule, other = (
    AuditRecord(),
    Rule("float32", path="a"),
    Rule("float32", path="b"),
  )
  record.note_rules([rule, other])
  for _ in range(2):
    record.note("a", AuditedModule("Dense", rule.policy, rule, None))
  record.note("c", AuditedModule("Dense", None, None, None))
  assert record.rules == {rule: 1, other: 0}
  assert list(record.modules) == ["a", "c"]


def test_each_audit_traces_anew():
  traced = []

  @jax.jit
  def fn(x):
    traced.append(AUDIT.value)
    return x

  first, second = AuditRecord(), AuditRecord()
  fn(jnp.ones(2))
  for record in (first, second):
    with AUDIT(record):
      jax.make_jaxpr(fn)(jnp.ones(2))
  fn(jnp.ones(2))
  assert traced == [None, first, second]
