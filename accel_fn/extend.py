"""For those who write transforms and strategies: what a plan is made of, and what helps to fill it."""

from accel_fn.base.batch import to_device as to_device
from accel_fn.base.state import LossScale as LossScale
from accel_fn.step.loop import Strategy as Strategy
from accel_fn.step.observers import Observer as Observer
from accel_fn.step.plan import GradFn as GradFn
from accel_fn.step.plan import SlotFunction as SlotFunction
from accel_fn.step.plan import Stateful as Stateful
from accel_fn.transforms.amp.amp import compute_dtype as compute_dtype

__all__ = [
    "GradFn",
    "LossScale",
    "Observer",
    "SlotFunction",
    "Stateful",
    "Strategy",
    "compute_dtype",
    "to_device",
]
