"""What is learnt? Losses, metrics, and what targets look like: one kind of task, one file."""
