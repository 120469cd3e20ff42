"""What puts the parts together: `with_policy`, `value_and_grad`, `opt_level`."""
