"""Generated mutants that compute the same as the code, each with the reason."""

EQUIVALENT: dict[str, str] = {
  "mpjax/transforms/_check_loss_scaling.py::_power: "
  "np.abs(ratios * _FACTOR ** power - 1) < 0.1, LtE for Lt": (
    "Near 1 a float differs from 1 by a multiple of 2^-53, which 0.1 is not: they are never equal."
  ),
}
"""Reasons by the name of the mutant."""
