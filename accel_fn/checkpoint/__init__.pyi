from accel_fn.checkpoint.listing import Checkpoint as Checkpoint
from accel_fn.checkpoint.listing import list_checkpoints as list_checkpoints
from accel_fn.checkpoint.weights.whole_state_dict import whole_state_dict as whole_state_dict
from accel_fn.contrib.accelerate.checkpoint import load_accelerate as load_accelerate
