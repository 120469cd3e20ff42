import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax
from mpjax._diagnostics.tune.modules import is_inside, modules_of, rules_for
from mpjax._jaxprs.steps import body_of

HALF = mpjax.Policy.parse("mixed_bfloat16")


def test_modules_with_their_flops_forward_and_backward():
  def loss(w, x):
    with jax.named_scope("outer"):
      y = x @ w
      with jax.named_scope("inner"):
        y = jnp.einsum("ij,jk->ik", y, w)
      y = jax.lax.scan(lambda c, _: (c @ w, None), y, None, 3)[0]
    return jnp.sum(y)

  found = modules_of(
    body_of(jax.make_jaxpr(jax.value_and_grad(loss))(jnp.ones((4, 4)), jnp.ones((2, 4))))
  )
  flops = dict(zip(found.paths, found.flops, strict=True))
  one = 2 * 2 * 4 * 4
  # The gradient by `x` is not needed.
  assert flops["outer/inner"] == 3 * one
  assert flops["outer"] == 2 * one + 3 * 3 * one
  assert set(flops) == {"outer", "outer/inner", ""}
  assert flops[""] == 0


SCOPES = (
  *("", "Net", "Net/a", "Net/a/b", "Net/b", "Net/c(1)", "head"),
  *("Net/Net.encode", "Net/Net.encode/enc", "Net/rnn/cell.scan_fn", "Net/rnn/cell.scan_fn/cell/hi"),
)


def test_modules_inside_of_a_chosen_one_keep_the_policy():
  rules = rules_for(["Net/a"], ["Net/a/b", "Net/b"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/a", "**/a/b"]
  assert rules[1].policy == HALF
  rules = rules_for(["Net/a", "Net/a/b"], ["Net/b"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/a"]
  rules = rules_for(["Net", "Net/a/b"], ["Net/a"], SCOPES, HALF)
  assert [rule.path for rule in rules] == ["**/Net", "**/a/b", "**/a"]
  assert is_inside("a/b", "a")
  assert not is_inside("ab", "a")
  assert is_inside("a", "")


def test_rules_for_modules_inside_of_methods_match_in_linen():
  class Net(nn.Module):
    def setup(self):
      self.enc = nn.Dense(4)

    def encode(self, x):
      return self.enc(x)

    @nn.compact
    def __call__(self, x):
      return nn.RNN(nn.LSTMCell(4), name="rnn")(self.encode(x))

  x = jnp.ones((1, 2, 4))
  variables = jax.eval_shape(Net().init, jax.random.key(0), x)
  loss = jax.value_and_grad(lambda v: jnp.sum(Net().apply(v, x)))
  found = modules_of(body_of(jax.make_jaxpr(loss)(variables)))
  chosen = [path for path in found.paths if path.endswith(("enc", "hi"))]
  others = [path for path in found.paths if path not in chosen]
  assert len(chosen) == 2
  net = mpjax.linen.with_policy(
    Net(), HALF, rules=rules_for(chosen, others, found.scopes, HALF), unmatched="raise"
  )
  jax.eval_shape(net.apply, variables, x)
