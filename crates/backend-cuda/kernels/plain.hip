// Program of level plain: every kernel that needs no matrix instructions.
#include "forward.cuh"
#include "backward.cuh"
#include "merge_splits.cuh"
#include "bias_gradient.cuh"
#include "rows.cuh"
#include "records.cuh"
