"""The server's side of a round: opening, validating, closing; who is asked, and whether everything fits."""
