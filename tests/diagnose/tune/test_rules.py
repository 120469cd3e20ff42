import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax
from mpjax._diagnose.paths import rule_paths_of
from mpjax._diagnose.tune.rules import rules_for
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import body_of
from tests import programs

HALF = mpjax.Policy.parse("mixed_bfloat16")
HALF16 = mpjax.Policy.parse("mixed_float16")
WIDE = mpjax.Policy.parse("float32_highest")

DOT = "dot_general"

SCOPES = ("", "Net", "Net/a", "Net/a/b", "Net/b", "Net/c(1)", "head", "Net/rnn/cell/hi")

HOMES = dict(zip(SCOPES, SCOPES, strict=True))


def test_modules_inside_of_a_chosen_one_keep_the_policy():
  rules = rules_for({"Net/a": WIDE, "Net/a/b": HALF, "Net/b": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/a", "**/a/b"]
  assert rules[1].policy == HALF
  rules = rules_for({"Net/a": WIDE, "Net/a/b": WIDE, "Net/b": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/a"]
  # In low precision results stay as they were computed; a module in float32 takes float32.
  rules = rules_for({"Net": HALF, "Net/a": HALF16, "Net/b": WIDE, "Net/b/c": HALF16}, HOMES, HALF)
  dtypes = {rule.path: str(rule.policy.output_dtype) for rule in rules}
  assert dtypes == {"**/a": "None", "**/Net/b": "float32", "**/c": "float32"}
  rules = rules_for({"Net": WIDE, "Net/a/b": WIDE, "Net/a": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/Net", "**/a/b", "**/a"]


def test_rules_for_methods_select_the_same_in_linen_and_in_autocast():
  class Net(nn.Module):
    def setup(self):
      self.emb, self.enc = nn.Embed(5, 8), nn.Dense(8)

    def encode(self, x):
      return self.enc(self.emb(x))

    @nn.compact
    def __call__(self, x):
      return self.emb.attend(nn.RNN(nn.LSTMCell(8), name="rnn")(self.encode(x)))

  x = jnp.ones((1, 2), int)
  variables = jax.eval_shape(Net().init, jax.random.key(0), x)
  body = body_of(jax.make_jaxpr(jax.grad(lambda v: jnp.sum(Net().apply(v, x))))(variables))
  chosen = ["Net/emb", "Net/enc", "Net/rnn/LSTMCell_0/hi"]
  paths = dict.fromkeys(step.location.path for step in body.every_step() if not step.bodies)
  formats = {path: WIDE if path in chosen else HALF for path in paths}
  rules = rules_for(formats, rule_paths_of(Graph(body)), HALF)
  for apply in (
    mpjax.with_policy(Net(), HALF, rules=rules, unmatched="raise").apply,
    mpjax.autocast(Net().apply, HALF, rules=rules),
  ):
    equations = programs.equations(jax.make_jaxpr(apply)(variables, x))
    matmuls = [eqn.outvars[0].aval.dtype for eqn, _ in equations if eqn.primitive.name == DOT]
    assert (matmuls.count("float32"), matmuls.count("bfloat16")) == (3, 7)
