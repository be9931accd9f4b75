#include "cuda/norm.cuh"
