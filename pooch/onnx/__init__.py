"""ONNX models as workloads: parsed as data, built as modules, trained, and written back."""
