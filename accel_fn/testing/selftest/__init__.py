"""The checks of `accel-fn test`."""
