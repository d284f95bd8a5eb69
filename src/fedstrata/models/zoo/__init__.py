"""The families of models behind `fedstrata.models.registry`: one file a family, shared parts in `parts`."""
