"""How do the updates of a round become one? One rule, one file, and one row in `rules`."""
