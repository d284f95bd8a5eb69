"""What is learnt: the loss, and what counts as right."""
