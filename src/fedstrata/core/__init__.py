"""What the whole code speaks in: types that travel, what a technique is, names with arguments, tensors, seeds."""
