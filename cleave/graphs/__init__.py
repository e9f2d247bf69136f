"""Layers of a model as ONNX graphs, which devices run without torch."""
