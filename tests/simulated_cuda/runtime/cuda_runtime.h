// PyTorch's headers ask for this one; its compiler half is of no use here, and pip's packages lack what it wants.
#pragma once
#include <cuda_runtime_api.h>
