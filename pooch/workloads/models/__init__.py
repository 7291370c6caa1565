"""The networks of the built-in workloads, one file per family.

A builder also has to work in `torch._subclasses.FakeTensorMode`: it does not read the contents of tensors, and makes
its data with torch only.
"""
