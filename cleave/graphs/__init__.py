"""Export a model's layers and loss as ONNX graphs, which devices can run without torch."""
