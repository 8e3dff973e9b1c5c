// Program of the kernels on matrix cores (MFMA) of AMD's CDNA GPUs; plain.hip has the others.
#include "forward_matrix.cuh"
#include "backward_queries_matrix.cuh"
#include "backward_keys_matrix.cuh"
