"""How a round's clients are run: one after the other, in processes, many at once, on a cluster."""
