"""Run `python -m accel_fn`, for machines where the script `accel-fn` is not on the PATH."""

from accel_fn.cli import main

if __name__ == "__main__":
    main()
