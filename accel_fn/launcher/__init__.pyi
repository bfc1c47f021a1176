from accel_fn.launcher.settings import Given as Given
from accel_fn.launcher.settings import Layer as Layer
from accel_fn.launcher.settings import check_names as check_names
from accel_fn.parallel.launch_options import LaunchOptions as LaunchOptions
from accel_fn.parallel.launch_options import launch_options as launch_options
