"""The networks behind the built-in workloads, one file per family; each has one or more builders of a `Workload`.

A builder must also work inside `torch._subclasses.FakeTensorMode`: it reads no tensor's contents and makes its data
with torch alone.
"""
