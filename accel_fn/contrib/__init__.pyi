from accel_fn.contrib import estimate as estimate
from accel_fn.contrib import transformers as transformers
