"""A CUDA allocator that serves recorded steps from an arena, for PyTorch's `CUDAPluggableAllocator`."""

from .allocator import CudaArena, DeviceFunctions, cuda_arena

__all__ = ["CudaArena", "DeviceFunctions", "cuda_arena"]
