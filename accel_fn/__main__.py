"""The entry point of `python -m accel_fn`, for machines where `accel-fn` is not on the PATH."""

from accel_fn.cli import main

if __name__ == "__main__":
    main()
