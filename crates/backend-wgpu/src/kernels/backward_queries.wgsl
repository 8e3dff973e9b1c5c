// Adds a block's contribution to dQ / scale of one tile of queries of one head: Σ_j dx_ij·k_j.

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
    let head = (group / params.tiles) % params.heads;
    let batch = group / params.tiles / params.heads;
    let kv_head = (params.head_first + head) / params.group_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * tile_index;
    let row = first + {{TILE_ROWS}}u * ty;
{{COUNT_MATRICES}}

    let list = batch * params.plane_batch + head * params.plane_head + tile_index;
    let begin = block_mask[params.lists + list];
    let end = block_mask[params.lists + list + 1u];
    if (begin == end) {
        return;
    }

    let state = params.statistics_base + batch * params.statistics_batch + head * params.statistics_head;
    let acc = params.acc_base + batch * params.acc_batch + head * params.acc_head;
{{ROW_STATISTICS}}
{{LOAD_ACC}}
{{OWN_ROWS}}

    for (var run = begin; run < end; run++) {
        let first_tile = block_mask[params.runs + 3u * run];
        let end_tile = first_tile + block_mask[params.runs + 3u * run + 1u];
        let mask_index = block_mask[params.runs + 3u * run + 2u];
        for (var other_tile = first_tile; other_tile < end_tile; other_tile++) {
            let column = 32u * other_tile;
{{TILE_MASK}}
{{SCORES}}
{{DPROBS}}
            let key = column + 4u * tx;
{{DX}}
            workgroupBarrier();
            var words = {{ROW_WORDS}}(0u);
            for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
                words[r] = atomicLoad(&visible_bits[{{TILE_ROWS}}u * ty + r]);
            }
{{ACCUMULATE}}
        }
    }
{{STORE_ACC}}
}
