// Program of the forward pass on matrix cores (MFMA) of AMD's CDNA GPUs; plain.hip has the other
// kernels.
#include "forward_matrix.cuh"
