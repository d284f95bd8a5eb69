"""How does one client train, from an assignment to an update? The local step is in `step`."""
