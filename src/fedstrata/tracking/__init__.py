"""Where else is a run written down? In experiment trackers: W&B, MLflow, TensorBoard, each in a process of its own."""
