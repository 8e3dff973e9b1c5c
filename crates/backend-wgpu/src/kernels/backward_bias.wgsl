// Adds a block's contribution to dbias.
//
//   for each tile of the bias (one workgroup each):
//       for each batch row and head that shares it:
//           for each visible tile of the other side:  dbias += dS (or dX before the soft cap)
//
// Rows of a tile are keys if the bias has a key axis and no query axis, and are summed over
// queries. Otherwise rows are queries: with a key axis every pair has its own element; without, a
// row is summed over its keys.

@compute @workgroup_size({{INVOCATIONS}})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
#if MATRIX
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
#end
) {
    let group = params.first_group + workgroup.x + workgroup.y * params.grid_width;
    if (group >= params.end_group) {
        return;
    }
    let tile_index = {{LIST_INDEX}};
    let bias_head = (group / params.tiles) % params.bias_heads;
    let bias_batch = group / params.tiles / params.bias_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * tile_index;
    let row = first + {{TILE_ROWS}}u * ty;
{{COUNT_MATRICES}}
    // all batch rows and heads if they share the bias, else one
    let batch_begin = select(bias_batch, 0u, params.bias_batch == 0u);
    let batch_end = select(bias_batch + 1u, params.batches, params.bias_batch == 0u);
    let head_begin = select(bias_head, 0u, params.bias_head == 0u);
    let head_end = select(bias_head + 1u, params.heads, params.bias_head == 0u);
    let target_row = params.dbias_base + bias_batch * params.dbias_batch + bias_head * params.dbias_head;
    var all = {{ROW_FLOATS}}(0.0);

    for (var batch = batch_begin; batch < batch_end; batch++) {
        for (var head = head_begin; head < head_end; head++) {
            let kv_head = (params.head_first + head) / params.group_heads;
            let state = params.statistics_base + batch * params.statistics_batch + head * params.statistics_head;
            let list = batch * params.plane_batch + head * params.plane_head + tile_index;
            let begin = block_mask[params.lists + list];
            let end = block_mask[params.lists + list + 1u];
            for (var run = begin; run < end; run++) {
                let first_tile = block_mask[params.runs + 3u * run];
                let end_tile = first_tile + block_mask[params.runs + 3u * run + 1u];
                let mask_index = block_mask[params.runs + 3u * run + 2u];
                for (var other_tile = first_tile; other_tile < end_tile; other_tile++) {
                    let column = 32u * other_tile;
{{TILE_MASK}}
{{SCORES}}
{{DPROBS}}
{{STATISTICS}}
{{DX}}
                }
            }
        }
    }
#if SUM_ROWS
    // a row's partial sums lie in eight invocations
    workgroupBarrier();
    tile[8u * ty + tx] = all{{AS_FOUR}};
    workgroupBarrier();
    if (tx == 0u) {
        var sum = {{ROW_FLOATS}}(0.0);
        for (var n = 0u; n < 8u; n++) {
            sum = sum + tile[8u * ty + n]{{ROW_PART}};
        }
        for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
            if (row + r < {{ROWS}}) {
                let at = target_row + {{ROW_OFFSET}};
                dbias[at] = dbias[at] + sum[r];
            }
        }
    }
#end
}
