"""The wrappers of optimizers, each in the ways that it stores its state."""

import mpjax

WRAPPERS = {
  "loss_scaling": mpjax.loss_scaling,
  "accumulate_gradients": lambda tx: mpjax.accumulate_gradients(tx, 2),
  "master_weights": mpjax.master_weights,
  "split": lambda tx: mpjax.master_weights(tx, storage="split"),
  "monitor": mpjax.monitor,
  "state_dtype": lambda tx: mpjax.state_dtype(tx, mu="bfloat16"),
  "stochastic": lambda tx: mpjax.state_dtype(tx, mu="bfloat16", rounding="stochastic"),
}
