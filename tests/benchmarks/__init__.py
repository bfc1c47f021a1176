"""What a training step costs: by hand, with accelerate, with Lightning Fabric, with accel_fn."""
