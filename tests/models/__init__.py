"""Models that the integration tests put under policies. None of them knows of mpjax."""
