import jax
import jax.numpy as jnp

from mpjax._diagnostics.nonfinite.uses import uses_of
from mpjax._jaxprs.steps import body_of

X = jnp.ones(3)


def of_log(fn):
  """Returns whether the logarithm in a function may be discarded, also what comes of it."""
  body = body_of(jax.make_jaxpr(fn)(X), compiled=True)
  step = next(s for s in body.steps if s.eqn.primitive.name == "log")
  uses = uses_of(body)
  return step.outs[0] in uses.discarded, step.outs[0] in uses.derived


USES = [
  (lambda x: jnp.where(x > 0, jnp.log(x), 0), (True, True)),
  (lambda x: jnp.where(x > 0, x * jnp.log(x), 0), (True, True)),
  (lambda x: jnp.where(x > 0, jnp.log(x)[::-1], 0), (True, True)),
  (lambda x: jnp.log(x) > 0, (True, False)),
  (lambda x: jnp.log(x) * 2 > 0, (False, False)),
  (lambda x: jnp.where(x > 0, jnp.sum(jnp.log(x)), 0), (False, False)),
  (lambda x: (jnp.log(x), jnp.where(x > 0, jnp.log(x), 0))[0], (False, False)),
  # The flag of a skipped step is no mask.
  (lambda x: (lambda y: jnp.where(jnp.all(jnp.isfinite(y)), y, 0))(jnp.log(x)), (False, False)),
  (lambda x: (lambda y: jnp.where(jnp.isfinite(y), y, 0))(jnp.log(x)), (True, False)),
]


def test_what_may_be_discarded():
  assert [of_log(fn) for fn, _ in USES] == [wanted for _, wanted in USES]


def test_casts_of_constants_are_constants():
  body = body_of(jax.make_jaxpr(lambda x: x + jnp.asarray(-1e9).astype(x.dtype))(X), compiled=True)
  assert not uses_of(body).constants & set(body.inputs)
