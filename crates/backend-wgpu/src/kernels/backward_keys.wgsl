// What some queries give to dk and dv of one tile of keys of one key head: dv_j = Σ_i weight_ij·dout_i, dk_j = scale·Σ_i dx_ij·q_i.
//
// Rows of a tile are keys here, and columns queries. The queries of all heads of the group are summed up in order.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
#if MATRIX
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
#end
) {
    let group = workgroup.x + workgroup.y * numbers.grid_width;
    if (group >= numbers.groups) {
        return;
    }
    let own = group % numbers.tiles;
    let kv_head = numbers.key_head_first + (group / numbers.tiles) % numbers.key_heads;
    let batch = group / numbers.tiles / numbers.key_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * own;
    let row = first + 4u * ty;
{{COUNT_MATRICES}}

    let sums = numbers.sums_base + batch * numbers.sums_batch + kv_head * numbers.sums_head;
    let more = numbers.more_base + batch * numbers.more_batch + kv_head * numbers.more_head;
{{ZERO_SUMS}}

    let head_begin = max(kv_head * numbers.heads_a_key, numbers.head_first);
    let head_end = min((kv_head + 1u) * numbers.heads_a_key, numbers.head_first + numbers.heads);
    for (var query_head = head_begin; query_head < head_end; query_head++) {
        let head = query_head - numbers.head_first;
        let state = numbers.statistics_base + batch * numbers.statistics_batch + head * numbers.statistics_head;
        let list = batch * numbers.plane_batch + head * numbers.plane_head + own;
        let begin = sight[numbers.lists + list];
        let end = sight[numbers.lists + list + 1u];
        for (var run = begin; run < end; run++) {
            let first_tile = sight[numbers.runs + 3u * run];
            let end_tile = first_tile + sight[numbers.runs + 3u * run + 1u];
            let edge = sight[numbers.runs + 3u * run + 2u];
            for (var other = first_tile; other < end_tile; other++) {
                let column = 32u * other;
                workgroupBarrier();
                if (lane < 32u) {
                    var word = 0xffffffffu;
                    if (edge != NO_EDGE) {
                        word = sight[numbers.bits + 32u * edge + lane];
                    }
                    atomicStore(&seen[lane], word);
                }
{{LOGITS}}
{{PRODUCTS}}
                let query = column + 4u * tx;
{{COLUMN_STATISTICS}}
{{SLOPES}}
                workgroupBarrier();
                let is_edge = edge != NO_EDGE;
{{ACCUMULATE_VALUES}}
                workgroupBarrier();
{{STORE_TILE}}
{{ACCUMULATE_KEYS}}
            }
        }
    }
{{STORE_SUMS}}
}
