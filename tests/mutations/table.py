"""The mutations: mistakes that a developer of this project could really make.

Most of them have been made, in this kind of library. Where our code has no place for one, the
nearest mistake that it has a place for stands here, and its description says so. A number that
stands for two mistakes has a letter for each.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
  """One change of our code, and the test that has to notice.

  `old` is compared with the syntax tree of the function: line breaks, comments and kinds of quotes
  make no difference, nor does where in the function it is, functions defined in it included.
  """

  number: int
  breaks: str  # what is wrong with the changed code
  function: str  # "file::function" or "file::Class.method"; nothing after "::": the module level
  old: str  # an expression or statements, in the function exactly once
  new: str  # what takes its place; "" deletes statements
  test: str  # the id of a test function, without parameters
  letter: str = ""

  @property
  def file(self) -> str:
    """The file of the function."""
    return self.function.partition("::")[0]

  @property
  def name(self) -> str:
    """The number and the letter."""
    return f"{self.number}{self.letter}"


_SCALE = "mpjax/transforms/_loss_scale.py::"
_CONFIG = "mpjax/transforms/_loss_scale_config.py::"
_TREE = "mpjax/_core/trees.py::"
_LABELS = "mpjax/transforms/_labels.py::"
_SKIP = "mpjax/transforms/_skip.py::"
_SCALING = "mpjax/transforms/_loss_scaling.py::"
_ACCUMULATION = "mpjax/transforms/_accumulation.py::"
_MASTERS = "mpjax/transforms/_master_weights.py::"
_STEP = "mpjax/transforms/_train_step.py::"
_GRADIENTS = "mpjax/transforms/_gradients.py::"
_LEAVES = "mpjax/_core/leaves.py::"
_MODULE_CALLS = "mpjax/_jaxprs/module_calls.py::"
_TRACED_CALLS = "mpjax/_jaxprs/traced_calls.py::"
_INTERCEPT = "mpjax/linen/_intercept.py::"
_OUTERMOST = "mpjax/linen/_outermost.py::"
_OUTERMOST_OF_NNX = "mpjax/nnx/_outermost.py::"

_TEST_SCALE = "tests/transforms/test_loss_scale.py::"
_TEST_SCALING = "tests/transforms/test_loss_scaling.py::"

_TEST_ACCUMULATION = "tests/transforms/test_accumulation.py::"
_TEST_ATOMIC = (
  "tests/integration/test_train_step_is_atomic.py::test_a_skipped_step_is_a_deleted_step"
)

_DYNAMICS = (
  Mutation(
    number=1,
    breaks="growth one step late: `>` for `>=`",
    function=_SCALE + "adjust",
    old="good_steps >= config.growth_interval",
    new="good_steps > config.growth_interval",
    test=_TEST_SCALE + "test_growth",
  ),
  Mutation(
    number=2,
    breaks="an overflow does not restart the window for growth",
    function=_SCALE + "adjust",
    old="jnp.where(finite, _count_up(state.good_steps, finite), 0)",
    new="_count_up(state.good_steps, finite)",
    test=_TEST_SCALE + "test_growth",
  ),
  Mutation(
    number=3,
    breaks="growth does not restart the window",
    function=_SCALE + "adjust",
    old="good_steps = jnp.where(grow, 0, good_steps)",
    new="",
    test=_TEST_SCALE + "test_growth",
  ),
  Mutation(
    number=4,
    breaks="backoff multiplies twice",
    function=_SCALE + "adjust",
    old="_float32(config.backoff_factor)",
    new="_float32(config.backoff_factor) ** 2",
    test=_TEST_SCALE + "test_limits",
  ),
  Mutation(
    number=5,
    breaks="no floor under the scale",
    function=_SCALE + "adjust",
    old="jnp.maximum(scale * factor, low)",
    new="scale * factor",
    test=_TEST_SCALE + "test_limits",
  ),
  Mutation(
    number=6,
    breaks="no ceiling over the scale",
    function=_SCALE + "adjust",
    old="jnp.minimum(jnp.maximum(scale * factor, low), high)",
    new="jnp.maximum(scale * factor, low)",
    test=_TEST_SCALE + "test_limits",
  ),
  Mutation(
    number=7,
    breaks="growth does not refill the hysteresis",
    function=_SCALE + "adjust",
    old="jnp.where(grow, config.hysteresis, left)",
    new="left",
    test=_TEST_SCALE + "test_only_growth_refills_the_hysteresis",
  ),
  Mutation(
    number=8,
    breaks="min_scale is its default again once it is read from the structure of a state "
    "(the list: reset in tree_unflatten; our limits are no leaves, but part of the structure)",
    function=_LABELS + "parse_label",
    old='given.get("min_scale", DynamicLossScale.min_scale)',
    new="DynamicLossScale.min_scale",
    test="tests/transforms/test_labels.py::test_label_keeps_the_limits_exactly",
  ),
  Mutation(
    number=9,
    breaks="gradients are divided by the scale of the next step",
    function=_SCALING + "loss_scaling",
    old="new_updates, new_inner = update_shown(inner, gradient, inner_state, params, more, call)",
    new="""
flags = {"finite": all_finite, "all_finite": all_finite, "applied": all_finite}
moved = {k: adjust(configs[k], old[k], first_bad=first_bad[k], **flags) for k in old}
parts = [unscale_tree(g, moved[k].scale) for k, g in grads.items()]
gradient = float32_view(_sum(parts))
new_updates, new_inner = update_shown(inner, gradient, inner_state, params, more, call)
""",
    test=_TEST_SCALING + "test_momentum_is_exact_while_the_scale_changes_every_step",
  ),
  Mutation(
    number=10,
    breaks="a scale of 2^127 is allowed, whose reciprocal XLA flushes to 0",
    function=_CONFIG,
    old="SMALLEST, LARGEST = 2.0**-126, 2.0**126",
    new="SMALLEST, LARGEST = 2.0**-126, 2.0**127",
    test="tests/transforms/test_loss_scale_config.py::test_scales_outside_the_hard_limits",
  ),
  Mutation(
    number=11,
    breaks="half gradients are divided in half, and cast afterwards",
    function=_SCALE + "_unscale_leaf",
    old="g = strong(at_least_float32(g))",
    new="""
g = strong(at_least_float32(g if scale is None else g / scale.astype(g.dtype)))
scale = None
""",
    test=_TEST_SCALE + "test_the_cast_comes_before_the_division",
  ),
  Mutation(
    number=12,
    breaks="a half loss is multiplied in half",
    function="mpjax/transforms/_value_and_grad.py::_scaled",
    old="wide * scale.astype(wide.dtype)",
    new="(loss * scale.astype(loss.dtype)).astype(wide.dtype)",
    test="tests/transforms/test_state.py::test_half_loss_is_cast_before_it_is_multiplied",
  ),
  Mutation(
    number=13,
    breaks="the first scale is weakly typed: the second step is another program",
    function=_SCALE + "init_scale",
    old="jnp.asarray(config.init_scale if dynamic else config.scale, jnp.float32)",
    new="jnp.asarray(config.init_scale if dynamic else config.scale)",
    test="tests/integration/test_one_trace.py::test_one_trace_for_a_thousand_steps",
  ),
)

_CHECKS = (
  Mutation(
    number=14,
    breaks="a sum is checked, which overflows where no element does",
    function=_TREE + "first_nonfinite",
    old="jnp.all(jnp.isfinite(leaves[position]))",
    new="jnp.isfinite(jnp.sum(leaves[position]))",
    test=_TEST_SCALING + "test_what_counts_as_bad",
  ),
  Mutation(
    number=15,
    breaks="a comparison with the largest number is the check: NaN passes",
    function=_TREE + "first_nonfinite",
    old="finite = jnp.all(jnp.isfinite(leaves[position]))",
    new="""
x = jnp.asarray(leaves[position])
finite = jnp.logical_not(jnp.any(jnp.abs(x) > jnp.finfo(x.dtype).max))
""",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=16,
    breaks="only NaN is looked for",
    function=_TREE + "first_nonfinite",
    old="jnp.all(jnp.isfinite(leaves[position]))",
    new="jnp.logical_not(jnp.any(jnp.isnan(leaves[position])))",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=17,
    letter="a",
    breaks="the first leaf is not checked",
    function=_TREE + "first_nonfinite",
    old="range(len(leaves))",
    new="range(1, len(leaves))",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=17,
    letter="b",
    breaks="the last leaf is not checked",
    function=_TREE + "first_nonfinite",
    old="range(len(leaves))",
    new="range(len(leaves) - 1)",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=18,
    breaks="gradients of several losses are checked, and not their sum, which may overflow (the "
    "list: a check before the reduction; over devices they are averaged before they get there)",
    function=_SCALING + "loss_scaling",
    old="_all_finite(total(grads), axis_name)",
    new="_all_finite(total(grads), axis_name) if check_updates else True",
    test="tests/integration/test_several_losses.py"
    "::test_a_sum_that_overflows_is_skipped_and_no_scale_is_to_blame",
  ),
  Mutation(
    number=19,
    breaks="clipping, inside, sees scaled gradients; its result is unscaled",
    function=_SCALING + "loss_scaling",
    old="new_updates, new_inner = update_shown(inner, gradient, inner_state, params, more, call)",
    new="""
unchanged = float32_view(_sum(list(grads.values())))
new_updates, new_inner = update_shown(inner, unchanged, inner_state, params, more, call)
new_updates = total({label: new_updates for label in grads})
""",
    test=_TEST_SCALING + "test_clipping_does_not_depend_on_the_scale",
  ),
  Mutation(
    number=20,
    breaks="a skipped step keeps the parameters and moves the optimizer",
    function=_SKIP + "step_or_select",
    old="pick(keep, (updates, new), (nothing_like(updates), old))",
    new="pick(keep, updates, nothing_like(updates)), new",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=21,
    breaks="batch statistics of a skipped step are kept",
    function=_STEP + "make_train_step",
    old='("step", "model_state", "ema", *(() if applied else ("params",)))',
    new='("step", "ema", *(() if applied else ("params",)))',
    test=_TEST_ATOMIC,
  ),
  Mutation(
    number=22,
    breaks="the average of parameters goes on at a skipped step",
    function=_STEP + "make_train_step",
    old='("step", "model_state", "ema", *(() if applied else ("params",)))',
    new='("step", "model_state", *(() if applied else ("params",)))',
    test=_TEST_ATOMIC,
  ),
  Mutation(
    number=23,
    letter="a",
    breaks="the counts of schedules go on at a skipped step",
    function=_SKIP + "step_or_select",
    old="return pick(keep, (updates, new), (nothing_like(updates), old))",
    new="""
kept, held = pick(keep, (updates, new), (nothing_like(updates), old))
counted = jax.tree.map(lambda n, h: n if n.dtype == jnp.int32 else h, new, held)
return kept, counted
""",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=23,
    letter="b",
    breaks="a skipped step is counted as a step",
    function=_STEP + "make_train_step",
    old='("step", "model_state", "ema", *(() if applied else ("params",)))',
    new='("model_state", "ema", *(() if applied else ("params",)))',
    test=_TEST_ATOMIC,
  ),
  Mutation(
    number=24,
    breaks="updates are multiplied by the flag: NaN times 0 is NaN",
    function=_SKIP + "step_or_select",
    old="pick(keep, (updates, new), (nothing_like(updates), old))",
    new="jax.tree.map(lambda u: u * keep.astype(u.dtype), updates), pick(keep, new, old)",
    test=_TEST_SCALING + "test_a_skipped_step_changes_nothing",
  ),
  Mutation(
    number=25,
    breaks="check_updates looks at nothing, unless there are several losses",
    function=_SCALING + "loss_scaling",
    old="_all_finite(looked_at, axis_name) if check_updates else True",
    new="_all_finite(looked_at, axis_name) if check_updates and several else True",
    test=_TEST_SCALING + "test_updates_that_are_not_finite",
  ),
)

_ACCUMULATIONS = (
  Mutation(
    number=26,
    breaks="accumulate lets a loss scale in, and adds up scaled gradients",
    function=_ACCUMULATION + "accumulate_gradients",
    old="scales_in(inner_state)",
    new="scales_in(view)",
    test=_TEST_ACCUMULATION + "test_a_loss_scale_inside_is_refused",
  ),
  Mutation(
    number=27,
    breaks="micro-batches are added up in the dtype of the parameters",
    function=_GRADIENTS + "batch_gradients",
    old="jax.tree.map(jnp.add, total, grads)",
    new="""
jax.tree.map(lambda t, g, p: (t + g).astype(p.dtype).astype(t.dtype), total, grads, params)
""",
    test="tests/transforms/test_gradients.py::test_sums_are_float32",
  ),
  Mutation(
    number=28,
    breaks="a bad micro-batch is counted, though nothing of it is in the sum",
    function=_SKIP + "step_or_select",
    old="return pick(keep, (updates, new), (nothing_like(updates), old))",
    new="""
kept, held = pick(keep, (updates, new), (nothing_like(updates), old))
if hasattr(new, "micro_batches"):
  held = held._replace(micro_batches=new.micro_batches)
return kept, held
""",
    test="tests/integration/test_accumulation_is_one_step.py::test_a_bad_micro_batch_in_each_place",
  ),
  Mutation(
    number=29,
    breaks="the sum is not cleared when a window ends "
    "(the list: when it is dropped; ours is never dropped, it waits)",
    function=_ACCUMULATION + "accumulate_gradients",
    old="jax.tree.map(lambda t, n: jnp.where(full, n, t), total, nothing_like(total))",
    new="total",
    test=_TEST_ACCUMULATION + "test_nothing_moves_until_the_last_micro_batch_and_then_by_the_mean",
  ),
  Mutation(
    number=30,
    breaks="the sum is divided by one more than was added",
    function=_ACCUMULATION + "accumulate_gradients",
    old="t / count.astype(t.real.dtype)",
    new="t / (count + 1).astype(t.real.dtype)",
    test=_TEST_ACCUMULATION + "test_the_mean_is_the_sum_divided_once",
  ),
)

_DEVICES = (
  Mutation(
    number=31,
    breaks="each device decides for itself",
    function=_SCALING + "_agree",
    old="jax.lax.pmin(first_bad, tuple(names))",
    new="first_bad",
    test="tests/integration/test_distributed_skip.py"
    "::test_sharded_parameters_a_nan_on_one_device_skips_everywhere",
  ),
  Mutation(
    number=32,
    breaks="the largest values are checked instead of the flags reduced: a maximum drops NaN",
    function=_SCALING + "loss_scaling",
    old="first_bad[label] = _agree(first_nonfinite(watched), axis_name)",
    new="""
if axis_name is not None:
  watched = [jax.lax.pmax(x, axis_name) for x in watched]
first_bad[label] = first_nonfinite(watched)
""",
    test="tests/integration/test_distributed_skip.py"
    "::test_sharded_parameters_a_nan_on_one_device_skips_everywhere",
  ),
  Mutation(
    number=33,
    breaks="gradients are averaged over devices in the dtype that they came in",
    function=_GRADIENTS + "batch_gradients",
    old="return at_least_float32(loss), vary(new), metrics, jax.tree.map(at_least_float32, grads)",
    new="return at_least_float32(loss), vary(new), metrics, grads",
    test="tests/transforms/test_gradients.py::test_sums_are_float32",
  ),
)

_POLICIES = (
  Mutation(
    number=34,
    breaks="the policy in force is a global, which no cache of jit knows of",
    function="mpjax/_core/active.py::",
    old="ACTIVE = jax.make_user_context(None)",
    new="""
class _Global:
  def __init__(self):
    self.value, self.entering, self.outer = None, None, []

  def __call__(self, state):
    self.entering = state
    return self

  def __enter__(self):
    self.outer.append(self.value)
    self.value = self.entering

  def __exit__(self, *error):
    self.value = self.outer.pop()


ACTIVE = _Global()
""",
    test="tests/linen/test_never_stale.py::test_scopes_in_turn_around_one_jitted_function",
  ),
  Mutation(
    number=35,
    breaks="a scope that an exception leaves stays in force",
    function="mpjax/linen/_with_policy.py::_Scope.__exit__",
    old="leave_scope(last)",
    new="if exception == (None, None, None):\n  leave_scope(last)",
    test="tests/linen/test_never_stale.py::test_a_scope_left_by_an_exception",
  ),
  Mutation(
    number=36,
    letter="a",
    breaks="integers are cast",
    function=_TREE + "is_floating",
    old="jnp.issubdtype(x.dtype, jnp.floating)",
    new="jnp.issubdtype(x.dtype, jnp.number)",
    test="tests/core/test_trees.py::test_every_floating_dtype_is_cast_and_no_integer_dtype",
  ),
  Mutation(
    number=36,
    letter="b",
    breaks="NumPy decides what is floating: bfloat16 is not",
    function=_TREE + "is_floating",
    old="jnp.issubdtype(x.dtype, jnp.floating)",
    new="np.issubdtype(x.dtype, np.floating)",
    test="tests/core/test_trees.py::test_every_floating_dtype_is_cast_and_no_integer_dtype",
  ),
  Mutation(
    number=37,
    breaks="a module that is traced is told the compute dtype, and rounds what operations decide",
    function=_MODULE_CALLS + "ModuleCall.run",
    old="dtype_field(self.module, dtype, always=state.cast)",
    new="dtype_field(self.module, policy.compute_dtype, always=True)",
    test="tests/jaxprs/test_module_calls.py"
    "::test_arguments_are_what_they_are_unless_a_module_is_called_in_its_compute_dtype",
  ),
  Mutation(
    number=38,
    letter="a",
    breaks="initial values are drawn in the compute dtype",
    function=_INTERCEPT + "_call",
    old="inside(active, module, how.policy, **kinds, exempt=how.exempt)",
    new="""
inside(
  dataclasses.replace(active, cast=active.cast or initializing),
  module, how.policy, **kinds, exempt=how.exempt
)
""",
    test="tests/linen/test_initialize.py::test_initial_values_are_drawn_in_float32",
  ),
  Mutation(
    number=38,
    letter="b",
    breaks="random numbers drawn by a trace that raised stay counted: the mask of dropout is "
    "another than without a policy (the list: its rate is cast, and the mask drawn in half)",
    function=_OUTERMOST + "rewritten",
    old="restore()\nraise",
    new="raise",
    test="tests/linen/test_outermost.py"
    "::test_a_module_that_raises_in_float32_draws_the_same_masks_in_its_compute_dtype",
  ),
)

_STORED = (
  Mutation(
    number=39,
    breaks="a master may be the very array that it was set from: donated, both are gone",
    function=_MASTERS + "set_master_params",
    old="jnp.array(new, jnp.float32, copy=True)",
    new="jnp.asarray(new, jnp.float32)",
    test="tests/transforms/test_master_weights.py"
    "::test_a_master_is_never_the_array_that_it_was_made_from",
  ),
  Mutation(
    number=40,
    letter="a",
    breaks="a checkpoint is cast to the dtypes of the target unasked",
    function=_LEAVES + "misfit",
    old="cast and are_floating(x, want)",
    new="are_floating(x, want)",
    test="tests/io/test_restore.py::test_another_dtype_is_an_error_that_names_every_leaf",
  ),
  Mutation(
    number=40,
    letter="b",
    breaks="a rule that picks out no module is ignored",
    function="mpjax/_core/policy_config.py::ModuleRecord.check",
    old='self.config.unmatched != "ignore"',
    new='self.config.unmatched == "warn"',
    test="tests/linen/test_with_policy.py"
    "::test_a_rule_that_matches_nothing_is_an_error_where_all_modules_are_passed",
  ),
)

_NNX = (
  Mutation(
    number=41,
    breaks="a perturbation decides the dtype of what it is added to",
    function="mpjax/nnx/_layers.py::",
    old="""
STATE: Mapping[type[nnx.Variable[Leaf]], StateKind] = {
  nnx.Param: StateKind(neutral=True, stored="param_dtype"),
  nnx.Perturbation: StateKind(neutral=True),
}
""",
    new="""
STATE: Mapping[type[nnx.Variable[Leaf]], StateKind] = {
  nnx.Param: StateKind(neutral=True, stored="param_dtype"),
}
""",
    test="tests/nnx/test_view.py::test_sow_and_perturb",
  ),
  Mutation(
    number=42,
    breaks="a variable that a call writes to takes the dtype that was computed",
    function=_OUTERMOST_OF_NNX + "rewritten",
    old="variable.set_raw_value(leaving(new, dtype))",
    new="variable.set_raw_value(new)",
    test="tests/nnx/test_view.py::test_variables_that_a_call_makes_or_changes_are_the_models",
  ),
  Mutation(
    number=43,
    breaks="a tracer is left in the user's model",
    function=_OUTERMOST_OF_NNX + "rewritten",
    old="changed and _hides_tracer(given)",
    new="False",
    test="tests/nnx/test_outermost.py"
    "::test_an_array_that_is_a_new_attribute_is_that_of_the_view_and_of_the_model",
  ),
  Mutation(
    number=44,
    breaks="the user's model itself becomes the view",
    function="mpjax/nnx/_with_policy.py::with_policy",
    old="nnx.clone(model, variables=False, graph=True)",
    new="model",
    test="tests/nnx/test_with_policy.py"
    "::test_a_view_holds_the_very_variables_and_leaves_the_model_alone",
  ),
  Mutation(
    number=45,
    breaks="the output dtype is for every module, not for the outermost one called",
    function=_MODULE_CALLS + "ModuleCall.output_dtype",
    old="not self.state.entered",
    new="not self.state.entered or outermost is not None",
    test="tests/integration/test_which_policy.py::test_output_dtypes_are_for_where_a_policy_begins",
  ),
  Mutation(
    number=46,
    breaks="what a policy says of weight gradients is forgotten where a call is rewritten",
    function=_TRACED_CALLS + "rewrite_calls",
    old="Settings(compute=low, ops=_OPS, weight_grads=wide, asked=asked, float8=recipe, "
    "modules=True)",
    new="Settings(compute=low, ops=_OPS, weight_grads=None, asked=asked, float8=recipe, "
    "modules=True)",
    test="tests/integration/test_weight_grads.py::test_one_product_of_half_numbers_into_float32",
  ),
  Mutation(
    number=47,
    breaks="what a call did to variables is lost",
    function=_OUTERMOST_OF_NNX + "rewritten",
    old="return changed, {} if changed else written, nnx.to_tree(done, ctxtag=_TAG)",
    new="return nodes, {}, nnx.to_tree(done, ctxtag=_TAG)",
    test="tests/nnx/test_outermost.py"
    "::test_statistics_and_counters_move_where_nothing_but_arrays_comes_out",
  ),
)

_STEPS = (
  Mutation(
    number=48,
    breaks="a loss that loss_fn has averaged over devices is differentiated as one number for all",
    function=_GRADIENTS + "batch_gradients",
    old="return vary(loss), aux",
    new="return loss, aux",
    test="tests/transforms/test_across_devices.py"
    "::test_a_loss_that_loss_fn_has_reduced_has_its_own_gradient",
  ),
  Mutation(
    number=49,
    breaks="a counter of local tokens becomes the largest of all devices",
    function="mpjax/transforms/_across_devices.py::_combine",
    old='how == "sum"',
    new='how == "both"',
    test="tests/transforms/test_across_devices.py::test_a_token_counter_beside_a_step_counter",
  ),
  Mutation(
    number=50,
    breaks="a mask that holds -inf skips every step",
    function=_GRADIENTS + "_unless_there_before",
    old="jnp.logical_or(new == old, both_nan)",
    new="both_nan",
    test="tests/transforms/test_train_step.py::test_what_was_infinite_before_skips_no_step",
  ),
  Mutation(
    number=51,
    breaks="the average of parameters that accumulate trains moves with each micro-batch",
    function=_STEP + "_average",
    old="moved if flag is None else jnp.where(flag, moved, e)",
    new="moved",
    test="tests/transforms/test_train_step.py"
    "::test_the_average_moves_with_updates_not_with_micro_batches",
  ),
  Mutation(
    number=52,
    breaks="with hysteresis a batch is run again at the same scale",
    function=_STEP + "_retried",
    old="jnp.where(withheld, lower, after.scale)",
    new="after.scale",
    test="tests/transforms/test_train_step.py::test_retries_equal_the_oracle",
  ),
)

_PRECISION = (
  Mutation(
    number=53,
    breaks="a rule's precision is not that of matmuls in jaxprs which stay in float32",
    function="mpjax/_jaxprs/autocast/higher_order.py::_entered",
    old="matmul_precision(place, settings) is not None",
    new="False",
    test="tests/integration/test_matmul_precision.py::test_matmuls_in_inner_jaxprs",
  ),
)

_FLOAT8 = (
  Mutation(
    number=54,
    breaks="an inf in an operand of a matmul in float8 is clipped, and the step goes on",
    function="mpjax/_jaxprs/autocast/float8_scaling.py::quantise",
    old="jnp.maximum(scale, _TINY)",
    new="jnp.clip(jnp.nan_to_num(scale), _TINY, 1e30)",
    test="tests/jaxprs/autocast/test_float8_dot.py::test_what_is_not_finite_is_not_clipped",
  ),
  Mutation(
    number=55,
    breaks="float16 overflows in a matmul in float8 before its scales are applied",
    function="mpjax/_jaxprs/autocast/float8_scaling.py::scaled_dot",
    old="dtype if float(jnp.finfo(dtype).max) > 1e38 and not batch else FLOAT32",
    new="dtype",
    test="tests/jaxprs/autocast/test_float8_dot.py"
    "::test_results_before_scaling_are_no_result_of_float16",
  ),
  Mutation(
    number=56,
    breaks="a gradient is e4m3 as what it meets is, and small gradients become 0",
    function="mpjax/_jaxprs/autocast/float8_dot.py::Matmul._multiplied",
    old="self.quantise(x, E5M2, axes[i])",
    new="self.quantise(x, E4M3, axes[i])",
    test="tests/jaxprs/autocast/test_float8_dot.py::test_all_three_matmuls_have_operands_in_float8",
  ),
  Mutation(
    number=57,
    breaks="the matmul of an embedding is in float8",
    function="mpjax/_jaxprs/module_calls.py::inside",
    old="is_table and policy is not None and policy.matmul is not None",
    new="False",
    test="tests/integration/test_float8.py"
    "::test_dense_layers_and_projections_are_in_float8_forward_and_backward",
  ),
)

_TOGETHER = "mpjax/_core/together.py::"

_KERNELS = (
  Mutation(
    number=58,
    letter="a",
    breaks="on a GPU the position of the first bad gradient does not count integers",
    function=_TOGETHER + "first_nonfinite_together",
    old="[inexact[i] for i in group]",
    new="group",
    test="tests/core/test_together.py::test_the_first_bad_leaf_is_numpys",
  ),
  Mutation(
    number=58,
    letter="b",
    breaks="leaves on a mesh are stacked, which gathers those that are divided differently",
    function=_TOGETHER + "_grouped",
    old="unknown or not isinstance(x, Tracer) or _divided(x, AxisType.Explicit)",
    new="not isinstance(x, Tracer) or _divided(x, AxisType.Explicit)",
    test="tests/core/test_together.py::test_leaves_on_a_mesh_are_not_gathered",
  ),
)

_SPLIT = "mpjax/transforms/_split.py::"
_TREES_OF_MASTERS = "mpjax/transforms/_masters.py::"
_STATE_DTYPE = "mpjax/transforms/_state_dtype.py::"

_TEST_SPLIT = "tests/transforms/test_split.py::"
_TEST_MASTERS = "tests/transforms/test_masters.py::"
_TEST_STATE_DTYPE = "tests/transforms/test_state_dtype.py::"

_SPLITS = (
  Mutation(
    number=59,
    breaks="the 17th bit of a split master is always 0: one of two ties comes back as the other",
    function=_SPLIT + "split",
    old="pack(parity)",
    new="pack(jnp.zeros_like(parity))",
    test=_TEST_SPLIT + "test_16_bits_are_the_difference_of_the_bits",
  ),
  Mutation(
    number=60,
    breaks="the 17th bit of a split master is never read",
    function=_SPLIT + "join",
    old="jnp.where(is_near, size + rest, apart)",
    new="size + rest",
    test=_TEST_SPLIT + "test_16_bits_are_the_difference_of_the_bits",
  ),
  Mutation(
    number=61,
    breaks="a master beyond the range of bfloat16 is rounded to an inf, which no update leaves",
    function=_SPLIT + "rounded",
    old="jnp.minimum(nearest, _LARGEST)",
    new="nearest",
    test=_TEST_SPLIT + "test_every_number_with_these_upper_bits_comes_back",
  ),
  Mutation(
    number=62,
    breaks="a master is split from its rounding where the addition ends at another parameter",
    function=_TREES_OF_MASTERS + "next_master",
    old="rounded(param.astype(jnp.float32) + update)",
    new="rounded(moved)",
    test=_TEST_MASTERS + "test_the_nearest_master_where_no_update_leads_to_the_rounded_one",
  ),
  Mutation(
    number=64,
    letter="a",
    breaks="split masters are read with any parameters",
    function=_TREES_OF_MASTERS + "check_split",
    old="isinstance(m, SplitMaster)",
    new="False",
    test=_TEST_MASTERS + "test_parameters_that_cannot_belong_to_the_state_raise",
  ),
  Mutation(
    number=64,
    letter="b",
    breaks="float32 parameters pass for bfloat16 ones that a wrapper shows in float32",
    function=_TREES_OF_MASTERS + "update_shown",
    old="check_split(entries_of(one), params, f'{where}(params)', view=False)",
    new="pass",
    test=_TEST_MASTERS + "test_parameters_of_another_dtype_never_give_masters",
  ),
  Mutation(
    number=65,
    breaks="float32 masters of a checkpoint are split from parameters that are not their rounding",
    function="mpjax/_io/master_storage.py::cross",
    old="not same",
    new="False",
    test="tests/io/test_master_storage.py::test_parameters_that_are_not_the_rounded_masters_raise",
  ),
  Mutation(
    number=66,
    breaks="which moment a field holds goes by its name alone, of all optimizers",
    function=_STATE_DTYPE + "_map_moments",
    old="_FIELDS_OF.get(type(owner).__name__, _FIELDS)",
    new="_FIELDS",
    test=_TEST_STATE_DTYPE + "test_first_moments_are_found_and_nothing_else",
  ),
  Mutation(
    number=67,
    breaks="second moments are stored in low precision without a word",
    function=_STATE_DTYPE + "state_dtype",
    old="nu is not None and not allow_second_moments",
    new="False",
    test=_TEST_STATE_DTYPE + "test_second_moments_are_refused_unless_asked_for",
  ),
  Mutation(
    number=68,
    breaks="first moments are computed in the dtype that they are stored in",
    function=_STATE_DTYPE + "state_dtype",
    old="cast(state, wide)",
    new="state",
    test=_TEST_STATE_DTYPE + "test_numbers_are_those_of_float32_arithmetic_on_rounded_moments",
  ),
)

MUTATIONS = (
  *(*_DYNAMICS, *_CHECKS, *_ACCUMULATIONS, *_DEVICES),
  *(*_POLICIES, *_STORED, *_NNX, *_STEPS, *_PRECISION, *_FLOAT8, *_KERNELS, *_SPLITS),
)
