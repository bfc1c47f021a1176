from accel_fn.core.loop import Strategy as Strategy
from accel_fn.core.observers import Observer as Observer
from accel_fn.core.plan import Plan as Plan
from accel_fn.core.step import Step as Step
from accel_fn.core.step import build as build
