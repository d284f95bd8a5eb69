"""What is learnt? The loss that clients train on."""
