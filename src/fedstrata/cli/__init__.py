"""How does one use fedstrata from a shell? Every module is named after its command, or the first of several."""
