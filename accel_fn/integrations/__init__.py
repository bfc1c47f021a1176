"""Other libraries' training loops over the step of accel_fn."""
