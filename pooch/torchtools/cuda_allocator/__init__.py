"""A CUDA allocator that serves recorded steps from an arena, for PyTorch's `CUDAPluggableAllocator`."""

from .allocator import CudaArena, DeviceFunctions, cuda_arena, installed_arena
from .steps import CudaSteps

__all__ = ["CudaArena", "CudaSteps", "DeviceFunctions", "cuda_arena", "installed_arena"]
