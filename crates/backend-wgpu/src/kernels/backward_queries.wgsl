// What a block of keys and values gives to dq / scale of one tile of queries of one head: Σ_j dx_ij·k_j.

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
    let head = (group / numbers.tiles) % numbers.heads;
    let batch = group / numbers.tiles / numbers.heads;
    let kv_head = (numbers.head_first + head) / numbers.heads_a_key;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * own;
    let row = first + 4u * ty;
{{COUNT_MATRICES}}

    let list = batch * numbers.plane_batch + head * numbers.plane_head + own;
    let begin = sight[numbers.lists + list];
    let end = sight[numbers.lists + list + 1u];
    if (begin == end) {
        return;
    }

    let state = numbers.statistics_base + batch * numbers.statistics_batch + head * numbers.statistics_head;
    let sums = numbers.sums_base + batch * numbers.sums_batch + head * numbers.sums_head;
{{ROW_STATISTICS}}
{{LOAD_SUMS}}

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
            let key = column + 4u * tx;
{{SLOPES}}
            workgroupBarrier();
            var words = vec4<u32>(0u);
            for (var r = 0u; r < 4u; r++) {
                words[r] = atomicLoad(&seen[4u * ty + r]);
            }
            let is_edge = edge != NO_EDGE;
{{ACCUMULATE}}
        }
    }
{{STORE_SUMS}}
}
