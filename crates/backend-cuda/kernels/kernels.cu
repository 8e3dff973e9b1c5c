// Program of the general kernels: level plain for any architecture and feature, forward and
// backward on tensor cores for 16-bit elements, row kernels, record kernels.
#include "forward.cuh"
#include "backward.cuh"
#include "forward_matrix.cuh"
#include "merge_splits.cuh"
#include "backward_queries_matrix.cuh"
#include "backward_keys_matrix.cuh"
#include "bias_gradient.cuh"
#include "rows.cuh"
#include "records.cuh"
