"""The keys of the loss scales in a state: what is written there is read again."""

import numpy as np
import pytest

import mpjax
from mpjax.transforms._labels import by_loss, label_configs, parse_label, write_label

DYNAMIC, STATIC, OFF = mpjax.DynamicLossScale(), mpjax.StaticLossScale(4), mpjax.NoLossScale()


def test_label_names_what_differs_from_the_defaults():
  hard = (2.0**-126, 2.0**126)
  wide = mpjax.DynamicLossScale(min_scale=hard[0], max_scale=hard[1], hysteresis=2)
  text = "dynamic(min_scale=1.17549435e-38,max_scale=8.50705917e+37,hysteresis=2)"
  for config, label, limits in (
    (mpjax.NoLossScale(), "none", hard),
    (mpjax.StaticLossScale(128), "static(scale=128)", hard),
    (mpjax.DynamicLossScale(), "dynamic", (1.0, 2.0**24)),
    (mpjax.DynamicLossScale(init_scale=4), "dynamic", (1.0, 2.0**24)),
    (wide, text, hard),
  ):
    assert write_label(config) == label
    assert parse_label(label).limits == limits


@pytest.mark.filterwarnings("ignore:.*power of two")
def test_label_keeps_the_limits_exactly():
  for low, high in np.exp(np.random.default_rng(0).uniform(-80, 80, (300, 2))):
    low, high = sorted((low, high))
    config = mpjax.DynamicLossScale(init_scale=low, min_scale=low, max_scale=high)
    assert parse_label(write_label(config)).limits == (config.min_scale, config.max_scale)


def test_a_label_says_what_its_configuration_is():
  other = mpjax.DynamicLossScale(max_scale=2.0**20, backoff_factor=0.25)
  for name in (None, "generator", "a=1,b"):
    for config, *expected in (
      (OFF, False, 2.0**126, 0.5),
      (mpjax.StaticLossScale(0.125), False, 0.125, 0.5),
      (DYNAMIC, True, 2.0**24, 0.5),
      (other, True, 2.0**20, 0.25),
    ):
      label = parse_label(write_label(config, name))
      assert (label.name, label.config) == (name, write_label(config))
      backoff = label.fields.get("backoff_factor", 0.5)
      assert [label.dynamic, label.largest, backoff] == expected


def test_labels_hold_names_and_configurations_in_the_order_of_a_tree():
  config = mpjax.DynamicLossScale(growth_interval=5)
  found = label_configs({"z": config, "a": STATIC}, None)
  assert list(found.items()) == [
    ("a:static(scale=4)", STATIC),
    ("z:dynamic(growth_interval=5)", config),
  ]
  assert label_configs(DYNAMIC, None) == {"dynamic": DYNAMIC}
  assert label_configs(DYNAMIC, "x") == {"x:dynamic": DYNAMIC}
  assert label_configs(OFF, None) == {"none": OFF}


def test_what_belongs_to_each_loss():
  configs = label_configs({"z": DYNAMIC, "a": STATIC}, None)
  tree = {"z": 1, "a": {"a": 2}}
  assert by_loss(tree, configs, True, "test") == {"a:static(scale=4)": {"a": 2}, "z:dynamic": 1}
  assert by_loss(tree, label_configs(DYNAMIC, "x"), False, "test") == {"x:dynamic": tree}
