"""A run on disk: records, checkpoints, client memory; writing them, and reading them back."""
