"""How good is a model? The task's metrics and its loss, of the global model, of architectures and of clients."""
