from accel_fn.contrib.estimate.memory import MemoryEstimate as MemoryEstimate
from accel_fn.contrib.estimate.memory import estimate_memory as estimate_memory
