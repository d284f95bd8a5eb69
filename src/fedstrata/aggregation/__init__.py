"""How the updates of a round become one: one rule, one file."""
