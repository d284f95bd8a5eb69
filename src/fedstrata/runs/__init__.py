"""What does a run leave behind? Closed rounds, records, checkpoints, client memory: written, and read back."""
