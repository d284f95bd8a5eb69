"""Which models can be named? One file per family; shared checks in `parts`, shared layers in `layers`."""
