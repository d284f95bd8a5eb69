"""What the command `fedstrata` does: a module for each group of its commands."""
