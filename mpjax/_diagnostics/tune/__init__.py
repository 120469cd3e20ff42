"""What must stay in float32: found by ranges, first-order sensitivities and a bisection."""
