"""Train a single-shot detector (SSD) with automatic mixed precision: three lines, dynamic scaling.

  python examples/ssd_detection.py

This is the workflow of MXNet's AMP tutorial. The scenes are made here: real handwritten digits at
random places and sizes on a noisy background; those in the test are others than those trained on.
A convolutional network predicts, for each of 180 anchor boxes at two scales, a class and how the
box differs from the anchor. Anchors are matched to boxes by overlap, three hard negatives are taken
for each match, and the loss is a cross-entropy for classes plus a smooth L1 for boxes.

The lines marked 1 to 3 are all that mixed precision adds. Where they stand in MXNet:

  1  `amp.init()`, which patches operators for the whole process; here one model
  2  `amp.init_trainer(trainer)`: a dynamic loss scale, and steps that overflow are skipped
  3  `with amp.scale_loss(loss, trainer)` and `backward()`

The scale doubles after every 20 finite steps, so that it comes to where gradients overflow, loses
one step there, and halves. Group normalisation keeps no statistics. With batch normalisation
`mpjax.keep_if_skipped` would restore them after a skipped step (see digits.py).
"""

import argparse
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import side_by_side
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax

STEPS = 400
BATCH = 32
SIZE = 48
MOST = 3  # digits in a scene
TOP = 20  # boxes of a class that are considered in a scene
BACKGROUND = 10  # the class of an anchor that matches nothing; 0 to 9 are the digits

SHAPES = {8: ((13, 6), (13, 10), (18, 9), (18, 14)), 16: ((25, 12), (25, 19), (34, 17), (34, 26))}
"""Height and width of the anchors in each cell, by stride of the two maps that have a head."""


class Scenes(NamedTuple):
  """Images and what is in them; places that no digit took have the class -1."""

  images: np.ndarray  # [N, SIZE, SIZE, 1]
  boxes: np.ndarray  # [N, MOST, 4]: y0, x0, y1, x1
  classes: np.ndarray  # [N, MOST]


def load_data():
  """Returns images and labels of scikit-learn's digits: to train on, and held out."""
  images, labels = load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8).astype(np.float32) / 16
  parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
  return (parts[0], parts[2]), (parts[1], parts[3])


def make_scenes(digits, count, rng):
  """Returns scenes of digits that do not touch, each with the box around its ink."""
  scenes = Scenes(
    rng.normal(0, 0.1, (count, SIZE, SIZE, 1)).astype(np.float32),
    np.zeros((count, MOST, 4), np.float32),
    np.full((count, MOST), -1, np.int32),
  )
  for image, boxes, classes in zip(*scenes, strict=True):
    taken = np.zeros((SIZE, SIZE), bool)
    for slot in range(rng.integers(1, MOST + 1)):
      number, side = rng.integers(len(digits[0])), rng.integers(12, 33)
      ink = ndimage.zoom(digits[0][number], side / 8, order=1)
      ink = ink[np.ix_(ink.max(1) > 0.2, ink.max(0) > 0.2)]
      height, width = ink.shape
      y, x = rng.integers(SIZE - height + 1), rng.integers(SIZE - width + 1)
      place = np.s_[y : y + height, x : x + width]
      if not taken[place].any():
        taken[place] = True
        image[..., 0][place] += ink
        boxes[slot], classes[slot] = (y, x, y + height, x + width), digits[1][number]
  return scenes


def anchors_of(stride):
  """Returns the anchors of all cells of a feature map."""
  centers = (np.arange(SIZE // stride, dtype=np.float32) + 0.5) * stride
  middle = np.stack(np.meshgrid(centers, centers, indexing="ij"), -1)[:, :, None]
  half_sides = np.array(SHAPES[stride], np.float32) / 2
  return np.concatenate([middle - half_sides, middle + half_sides], -1).reshape(-1, 4)


ANCHORS = np.concatenate([anchors_of(stride) for stride in SHAPES])
"""All anchors [A, 4] as y0, x0, y1, x1, in the order in which the heads give them."""

SIDES = ANCHORS[:, 2:] - ANCHORS[:, :2]


class Result(NamedTuple):
  """What came out."""

  step: Any  # (params, opt_state, scenes) -> params, opt_state, loss
  params: Any
  opt_state: Any
  precision: float  # the mean average precision on held-out digits
  scales: list[float]  # [steps], the loss scale that each step was made with


class Detector(nn.Module):
  """A convolutional backbone and two heads. Returns logits [N, A, 11] and offsets [N, A, 4]."""

  width: int = 16
  depth: int = 2  # convolutions at each scale

  @nn.compact
  def __call__(self, images):
    x, logits, offsets = images, [], []
    for factor, stride in ((1, 2), (2, 4), (4, 8), (8, 16)):
      for step in (2, *[1] * (self.depth - 1)):
        x = nn.Conv(factor * self.width, (3, 3), step, use_bias=False)(x)
        x = nn.relu(nn.GroupNorm(num_groups=8)(x))
      if stride in SHAPES:
        count = len(SHAPES[stride])
        logits.append(nn.Conv(count * (BACKGROUND + 1), (3, 3), name=f"classes_{stride}")(x))
        offsets.append(nn.Conv(count * 4, (3, 3), name=f"boxes_{stride}")(x))
    return by_anchor(logits, BACKGROUND + 1), by_anchor(offsets, 4)


DETECTOR = Detector()


def by_anchor(maps, numbers):
  """Returns what the heads found [N, A, numbers], from their maps [N, height, width, ...]."""
  return jnp.concatenate([x.reshape(len(x), -1, numbers) for x in maps], 1)


def overlap(a, b):
  """Returns the intersection over union of boxes [..., 4] and others [..., 4]."""
  sides = jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2])
  shared = jnp.maximum(sides, 0).prod(-1)
  areas = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
  return shared / jnp.maximum(areas - shared, 1e-6)


def encode(boxes):
  """Returns boxes [A, 4] as offsets from their anchors: of the middle, and the log of the sides."""
  sides = boxes[:, 2:] - boxes[:, :2]
  middles = (boxes[:, 2:] + boxes[:, :2] - ANCHORS[:, 2:] - ANCHORS[:, :2]) / 2
  return jnp.concatenate([middles / SIDES / 0.1, jnp.log(sides / SIDES) / 0.2], -1)


def decode(offsets):
  """Returns the boxes [A, 4] that offsets stand for: `encode` the other way round."""
  middles = (ANCHORS[:, 2:] + ANCHORS[:, :2]) / 2 + offsets[:, :2] * 0.1 * SIDES
  half_sides = jnp.exp(offsets[:, 2:] * 0.2) * SIDES / 2
  return jnp.concatenate([middles - half_sides, middles + half_sides], -1)


def match(boxes, classes):
  """Returns the class [A] and the offsets [A, 4] that the anchors of one scene are to predict.

  An anchor takes the box that it overlaps most, if by 40 % or more; each box takes its best anchor.
  """
  overlaps = jnp.where(
    classes[None] >= 0, overlap(ANCHORS[:, None], boxes[None]), -1.0
  )  # [A, MOST]
  best = overlaps.argmax(0)
  best = jnp.where(classes >= 0, best, len(ANCHORS))  # of no box: behind the last, not set
  chosen = overlaps.argmax(1).at[best].set(jnp.arange(MOST), mode="drop")
  matched = (overlaps.max(1) >= 0.4).at[best].set(True, mode="drop")
  wanted = encode(jnp.where(matched[:, None], boxes[chosen], ANCHORS))
  return jnp.where(matched, classes[chosen], BACKGROUND), wanted


def detection_loss(logits, offsets, scenes):
  """Returns the loss of a batch: of the classes and of the boxes, for each matched anchor."""
  classes, wanted = jax.vmap(match)(scenes.boxes, scenes.classes)
  matched = classes != BACKGROUND
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
  # Most anchors are background: of those, three for each match count, the worst of the scene.
  rank = jnp.argsort(jnp.argsort(jnp.where(matched, jnp.inf, -losses), axis=1), axis=1)
  counted = matched | (rank < 3 * matched.sum(1, keepdims=True))
  class_loss = jnp.where(counted, losses, 0).sum()
  box_loss = jnp.where(matched, optax.huber_loss(offsets, wanted).sum(-1), 0).sum()
  return (class_loss + box_loss) / matched.sum()


def suppressed(logits, offsets):
  """Returns what is found in one scene: boxes [10, TOP, 4] and scores [10, TOP], by class.

  Non-maximum suppression: a box that overlaps a better one of its class has the score 0.
  """
  scores, best = jax.lax.top_k(jax.nn.softmax(logits)[:, :BACKGROUND].T, TOP)
  boxes = decode(offsets)[best]
  overlaps = overlap(boxes[:, :, None], boxes[:, None])

  def drop_worse(i, scores):
    worse = (jnp.arange(TOP)[None] > i) & (overlaps[:, i] > 0.45) & (scores[:, i, None] > 0)
    return jnp.where(worse, 0, scores)

  return boxes, jax.lax.fori_loop(0, TOP, drop_worse, scores)


def average_precision(scores, overlaps, present):
  """Returns the area under precision over recall for one class, as PASCAL VOC has it.

  From the `scores` [N, TOP] of what was found in N scenes, its `overlaps` [N, TOP, MOST] with true
  boxes, and whether these are `present` [N, MOST] and of the class.
  """
  free, hits = present.copy(), []
  for index in np.argsort(-scores, axis=None, kind="stable"):
    scene, place = np.unravel_index(index, scores.shape)
    candidates = np.where(free[scene] & (scores[scene, place] > 0), overlaps[scene, place], 0)
    hits.append(candidates.max() >= 0.5)
    free[scene, candidates.argmax()] &= not hits[-1]
  precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
  # The best precision at this recall or a higher one.
  best = np.maximum.accumulate(precision[::-1])[::-1]
  return best[hits].sum() / present.sum()


@functools.partial(jax.jit, static_argnums=0)
def detect(model, params, scenes):
  """Returns the scores of what is found, and its overlaps with true boxes, by scene and class."""
  boxes, scores = jax.vmap(suppressed)(*model.apply({"params": params}, scenes.images))
  return scores, overlap(boxes[..., None, :], scenes.boxes[:, None, None])


def mean_average_precision(model, params, scenes):
  """Returns the mean over classes of the average precision, of boxes that overlap by half."""
  scores, overlaps = jax.device_get(detect(model, params, scenes))
  by_class = zip(scores.swapaxes(0, 1), overlaps.swapaxes(0, 1), range(BACKGROUND), strict=True)
  return float(np.mean([average_precision(s, o, scenes.classes == c) for s, o, c in by_class]))


def train(network, params, growth_interval, policy, steps, on_step):
  """Trains under a policy; returns the losses, and how well digits are found in new scenes."""
  digits, held_out = load_data()
  # bfloat16 has the range of float32: nothing overflows, and nothing has to be scaled.
  dynamic = mpjax.DynamicLossScale(growth_interval=growth_interval)
  loss_scale = dynamic if policy == "mixed_float16" else mpjax.NoLossScale()
  schedule = optax.warmup_cosine_decay_schedule(0, 4e-3, steps // 10, steps)
  tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(schedule, weight_decay=1e-3))

  model = mpjax.with_policy(network, policy)  # 1
  tx = mpjax.loss_scaling(tx, loss_scale)  # 2

  @jax.jit
  def step(params, opt_state, scenes):
    def loss_fn(params):
      return detection_loss(*model.apply({"params": params}, scenes.images), scenes)

    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params)  # 3
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  opt_state = tx.init(params)
  rng, losses, scales = np.random.default_rng(0), [], []
  for _ in range(steps):
    scales.append(float(mpjax.loss_scaling_metrics(opt_state)["loss_scale"]))
    params, opt_state, loss = step(params, opt_state, make_scenes(digits, BATCH, rng))
    losses.append(float(loss))
    on_step()
  mpjax.check_skipped_steps(opt_state)  # raises if the last 50 steps in a row were skipped
  scenes = make_scenes(held_out, 200, np.random.default_rng(1))
  precision = mean_average_precision(model, params, scenes)
  figures = {
    "mean average precision, 200 new scenes": f"{precision:.3f}",
    "loss (mean of the last 20 batches)": f"{np.mean(losses[-20:]):.3f}",
    "skipped steps": f"{int(mpjax.loss_scaling_metrics(opt_state)['skipped'])}",
    "loss scale: first, largest, last": f"{scales[0]:.0f}, {max(scales):.0f}, {scales[-1]:.0f}",
  }
  result = Result(step, params, opt_state, precision, scales)
  return side_by_side.Run(np.array(losses), figures, result)


def main(
  steps=STEPS,
  path=side_by_side.OUT / "ssd_detection.png",
  policies=side_by_side.POLICIES,
  console=None,
  *,
  network=DETECTOR,
  growth_interval=20,
):
  """Trains under each policy, prints a table, draws the losses, and returns the runs."""
  params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 1)))["params"]
  training = functools.partial(train, network, params, growth_interval)
  return side_by_side.compare("Digits found by an SSD", training, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--policy", action="append", choices=side_by_side.POLICIES)
  options = parser.parse_args()
  main(options.steps, policies=options.policy or side_by_side.POLICIES)
