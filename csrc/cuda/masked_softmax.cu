#include "cuda/masked_softmax.cuh"
