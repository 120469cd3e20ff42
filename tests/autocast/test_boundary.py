"""What crosses the boundary of a traced call, and what cannot."""

import collections
import dataclasses
import functools
import types
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from mpjax._autocast.boundary import Boundary, NotTraceable


class Holds:
  """No tree to JAX."""

  def __init__(self, *content):
    self.content = content


def recursive(x):
  holds = Holds(x)
  holds.itself = holds
  return holds


class Slots:
  """An object without a dict of attributes."""

  __slots__ = ("__hidden", "unset")

  def __init__(self, x):
    self.__hidden = x


def with_default(x):
  def fn(y=x):
    return y

  return fn


def with_keyword(x):
  def fn(*, y=x):
    return y

  return fn


def with_attribute(x):
  def fn():
    pass

  fn.held = x
  return fn


def undefined():
  def first():
    return second()  # pyright: ignore[reportUndefinedVariable]

  return first
  second = None


RETURNED = {
  "array": (lambda x: x, True),
  "tree": (lambda x: {"a": [x, (x, None)]}, True),
  "others": (lambda x: ("text", 1, str, types, object(), nn.relu, Holds("text", jnp.sum)), True),
  "NumPy": (lambda x: Holds(np.ones(2)), True),
  "function that is not defined yet": (lambda x: undefined(), True),
  "object": (Holds, False),
  "object in object": (lambda x: Holds(Holds({"a": x})), False),
  "object that holds itself": (recursive, False),
  "set": (lambda x: Holds({Holds(x)}), False),
  "function": (lambda x: functools.partial(lambda: x), False),
  "default of a function": (with_default, False),
  "keyword default": (with_keyword, False),
  "attribute of a function": (with_attribute, False),
  "jitted function": (lambda x: jax.jit(lambda: x), False),
  "partial": (lambda x: functools.partial(jnp.add, x), False),
  "keyword of a partial": (lambda x: functools.partial(jnp.add, y=x), False),
  "method": (lambda x: Holds(x).__init__, False),
  "method of a list": (lambda x: [x].append, False),
  "slots": (Slots, False),
  "slots without arrays": (lambda x: Slots("text"), True),
  "key": (lambda x: Holds({Holds(x): 0}), False),
  "proxy": (lambda x: types.MappingProxyType({"a": x}), False),
  "view of a dict": (lambda x: {"a": x}.items(), False),
  "deque": (lambda x: Holds(collections.deque([x])), False),
  "map": (lambda x: map(jnp.sin, [x]), False),
  "generator": (lambda x: (x for _ in range(1)), False),
  "generator in object": (lambda x: Holds(x for _ in range(1)), False),
}


def crossed(fn, *args):
  # Returns what `fn` does of arguments that have crossed the boundary, and crosses it back.
  boundary = Boundary(args)
  inside = boundary.inside([x + 1 if isinstance(x, jax.Array) else x for x in boundary.leaves])
  leaves, outside = inside.leave(fn(*inside.args))
  return outside([x * 2 if isinstance(x, jax.Array) else x for x in leaves])


@pytest.mark.parametrize(("fn", "fits"), RETURNED.values(), ids=RETURNED)
def test_what_is_returned(fn, fits):
  def call(x):
    if fits:
      crossed(fn, x)
    else:
      with pytest.raises(NotTraceable, match="holds arrays and is not a pytree"):
        crossed(fn, x)

  jax.eval_shape(call, jnp.ones(2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  x: object
  names: dict


class Pair(NamedTuple):
  z: object
  a: object


CONTAINERS = {
  "dict": lambda z, a: {"z": z, "a": a},
  "keys that do not sort": lambda z, a: {"z": z, 1: a},
  "OrderedDict": lambda z, a: collections.OrderedDict(z=z, a=a),
  "defaultdict": lambda z, a: collections.defaultdict(list, z=z, a=a),
  "FrozenDict": lambda z, a: FrozenDict(z={"y": z, "b": 0}, a=a),
  "NamedTuple": Pair,
  "dataclass": lambda z, a: Batch(z, {"y": a, "b": z}),
  "nested": lambda z, a: [({"z": (z, None)}, {"y": [a, a], "b": {}})],
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_keep_their_order_and_type(make):
  seen = []

  def fn(tree):
    seen.append(repr(tree))
    return make(jnp.float32(3), jnp.float32(4))

  tree = make(jnp.float32(1), jnp.float32(2))
  found = crossed(fn, tree)
  assert seen == [repr(make(jnp.float32(2), jnp.float32(3)))]
  assert repr(found) == repr(make(jnp.float32(6), jnp.float32(8)))


def test_one_object_is_one_object():
  def fn(first, second, tree):
    assert first is second is tree["x"][0]
    assert tree["x"] is tree["again"]
    y = first + 1
    return y, [y], tree["x"], tree

  x = jnp.zeros(2)
  held = [x]
  tree = {"x": held, "again": held}
  y, (again,), same, whole = crossed(fn, x, x, tree)
  assert y is again
  assert whole is tree
  assert same is held
  assert held[0] is x


EDITS = {
  # name: a call, and the container after it. Values are 1 more inside, and twice as much outside.
  "add": (lambda notes, x: notes.update(x=x), {"old": 8, "list": [0], "x": 10}),
  "replace": (lambda notes, x: notes.update(old=x), {"old": 10, "list": [0]}),
  "put back": (lambda notes, x: [notes.update(x=x), notes.pop("x")], {"old": 3, "list": [0]}),
  "remove": (lambda notes, x: notes.pop("old"), {"list": [0]}),
  "move": (lambda notes, x: notes["list"].append(notes.pop("old")), {"list": [0, 8]}),
}


@pytest.mark.parametrize(("fn", "edited"), EDITS.values(), ids=EDITS)
def test_what_a_call_does_to_a_container_is_done_to_the_one_of_the_caller(fn, edited):
  notes = {"old": jnp.float32(3), "list": [0]}
  held = notes["list"]
  crossed(fn, notes, jnp.float32(4))
  assert notes == edited
  assert notes["list"] is held


@jax.tree_util.register_pytree_node_class
class Stack:
  """A tree that is empty at first, and gives a new tuple at each look."""

  def __init__(self, items=()):
    self.items = list(items)

  def tree_flatten(self):
    return (tuple(self.items),), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(children[0])


@jax.tree_util.register_pytree_node_class
class Empty(Stack):
  def tree_flatten(self):
    return tuple(self.items), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
  """A tree that looks at what it is built of."""

  mean: object
  deviation: object

  def __post_init__(self):
    assert self.mean.shape == self.deviation.shape


CLASSES = {
  "new parts at each look": lambda x: Stack([x, x]),
  "empty": lambda x: Empty(),
  "checked": lambda x: Checked(x, x),
  "partial": lambda x: jax.tree_util.Partial(jnp.add, x),
  "sorted keys": lambda x: nnx.Dict(z=x, a=x),
}


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_classes_of_the_user_are_built_of_arrays_alone(make):
  # Not of what stands for them: a class may look at what it is given, or convert it.
  x = jnp.float32(1)

  def fn(tree):
    assert type(tree) is type(make(x))
    assert jax.tree.leaves(tree) == jax.tree.leaves(make(x + 1))
    return tree, make(x + 2)

  given = make(x)
  same, new = crossed(fn, given)
  assert same is given
  assert type(new) is type(given)
  assert jax.tree.leaves(new) == [2 * leaf for leaf in jax.tree.leaves(make(x + 2))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counted:
  x: object
  n: int = dataclasses.field(default=0, metadata={"static": True})


def count(counted, _):
  counted.n += 1


@pytest.mark.parametrize(
  ("make", "change"),
  [
    (Stack, lambda stack, x: stack.items.append(x)),
    (Empty, lambda stack, x: stack.items.append(x)),
    (lambda: Counted(jnp.ones(2)), count),
  ],
)
def test_a_class_of_the_user_that_is_changed_cannot_cross(make, change):
  given = make()
  with pytest.raises(NotTraceable, match="changes an argument in place"):
    crossed(change, given, jnp.ones(2))
  assert jax.tree.structure(given) == jax.tree.structure(make())
