"""ONNX models as workloads: read as data, built as modules, trained, and written back."""
