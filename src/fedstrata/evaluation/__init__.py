"""How good a model is: accuracy and loss, of the global model, of architectures and of clients."""
