from accel_fn.checkpoint.save_weights import whole_state_dict as whole_state_dict
from accel_fn.checkpoint.store import Checkpoint as Checkpoint
from accel_fn.checkpoint.store import list_checkpoints as list_checkpoints
from accel_fn.contrib.accelerate.checkpoint import load_accelerate as load_accelerate
