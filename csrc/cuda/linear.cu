#include "cuda/linear.cuh"
