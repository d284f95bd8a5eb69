"""Which examples does a client hold: datasets by name, their readers, partitions, batches and augmentations."""
