"""Which examples does a client hold? Datasets by name, their readers, partitions, batches and augmentations."""
