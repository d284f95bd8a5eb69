"""The equations of the techniques, worked out again in NumPy."""
