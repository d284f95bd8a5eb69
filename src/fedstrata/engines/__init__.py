"""How are a round's clients run? One after the other, in processes, many at once, on a cluster."""
