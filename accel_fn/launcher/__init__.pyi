from accel_fn.base.launch_options import LaunchOptions as LaunchOptions
from accel_fn.base.launch_options import launch_options as launch_options
