"""Layers of a model as graphs: ONNX that devices run without torch."""
