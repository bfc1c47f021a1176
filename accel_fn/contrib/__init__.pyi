from accel_fn.contrib import estimate as estimate
