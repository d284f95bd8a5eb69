"""What can a run be told? One schema for command line, TOML and Python, and what can be named in it."""
