// dK and dV of one tile of keys of one KV head: dv_j = Σ_i p_ij·dout_i, dk_j = scale·Σ_i dx_ij·q_i.
//
// Rows of a tile are keys, columns are queries. The query heads of the group are summed in order.
//
// If both accumulators together would take more registers than a GPU has, there are two passes over
// the queries: dV, then dK. They compute S twice: 5 products instead of 4.

#if SPLIT
// of 16 bytes, for matrices (matrices.rs)
var<workgroup> gradient_pass: vec4<u32>;
#end

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
    let kv_head = params.kv_head_first + (group / params.tiles) % params.kv_heads;
    let batch = group / params.tiles / params.kv_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * tile_index;
    let row = first + {{TILE_ROWS}}u * ty;
{{COUNT_MATRICES}}

    let dk_base = params.acc_base + batch * params.acc_batch + kv_head * params.acc_head;
    let dv_base_of_head = params.dv_base + batch * params.dv_batch + kv_head * params.dv_head;
{{OWN_ROWS}}
#if SPLIT
    for (var pass_index = 0u; pass_index < 2u; pass_index++) {
    if (lane == 0u) {
        gradient_pass.x = pass_index;
    }
    // uniform, as operations on matrices require
    let is_dv = workgroupUniformLoad(&gradient_pass).x == 0u;
    let acc_dim = select(params.head_dim, params.value_dim, is_dv);
#end
{{ZERO_ACC}}

    let head_begin = max(kv_head * params.group_heads, params.head_first);
    let head_end = min((kv_head + 1u) * params.group_heads, params.head_first + params.heads);
    for (var query_head = head_begin; query_head < head_end; query_head++) {
        let head = query_head - params.head_first;
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
{{SHARE_ROUNDS}}
{{SCORES}}
{{DPROBS}}
                let query = column + 4u * tx;
{{COLUMN_STATISTICS}}
{{DX}}
                workgroupBarrier();
#if SPLIT
{{ACCUMULATE}}
#else
{{ACCUMULATE_DV}}
{{STORE_TILE}}
{{ACCUMULATE_DK}}
#end
            }
        }
    }
{{STORE_ACC}}
#if SPLIT
    }
#end
}
