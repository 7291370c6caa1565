"""Mode "fake": a profile from tensors that have shapes but neither memory nor data."""
