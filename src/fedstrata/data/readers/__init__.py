"""Readers of upstream's files: one format, one file."""
