"""How are upstream's files read? One format, one file; `archives` finds them, `build` makes a `Dataset` of them."""
