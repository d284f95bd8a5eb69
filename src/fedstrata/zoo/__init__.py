"""The families of models behind `fedstrata.models`: one file a family, shared parts in `parts`."""
