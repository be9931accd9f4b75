#include "cuda/kv_cache.cuh"
