from accel_fn.contrib import accelerate as accelerate
from accel_fn.contrib import deepspeed as deepspeed
from accel_fn.contrib import estimate as estimate
from accel_fn.contrib import migrate as migrate
from accel_fn.contrib import runs as runs
from accel_fn.contrib import transformers as transformers
