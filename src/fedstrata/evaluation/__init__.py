"""How good is a model? Accuracy and loss, of the global model, of architectures and of clients."""
