// Names of number formats that cuBLAS's headers mention. The header that defines them wants a package that PyTorch does
// not bring, and nothing here computes.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#define __CUDA_FP4_H__
struct __half;
struct __nv_bfloat16;
