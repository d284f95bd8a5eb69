"""What a run can be told: one schema for command line, TOML and Python, and what can be named in it."""
