"""Benchmarks: the cost of a training step by hand, with accelerate, Lightning Fabric and
accel_fn."""
