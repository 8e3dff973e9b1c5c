// What a block of keys and values gives to the gradient of the bias.
//
// One workgroup owns what it adds to: all elements of one tile of the bias, whose heads and batch rows, where the bias has one for all, are worked
// one after another. Bias with a key axis and no query axis: rows of a tile are keys, and a row is summed over its queries. Else rows are queries:
// with a key axis each pair has an element; without, a row is summed over its keys.

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
    let bias_head = (group / numbers.tiles) % numbers.bias_heads;
    let bias_batch = group / numbers.tiles / numbers.bias_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
    let first = 32u * own;
    let row = first + 4u * ty;
{{COUNT_MATRICES}}
    // one for all, or this one
    let batch_begin = select(bias_batch, 0u, numbers.bias_batch == 0u);
    let batch_end = select(bias_batch + 1u, numbers.batches, numbers.bias_batch == 0u);
    let head_begin = select(bias_head, 0u, numbers.bias_head == 0u);
    let head_end = select(bias_head + 1u, numbers.heads, numbers.bias_head == 0u);
    let target_row = numbers.gradient_base + bias_batch * numbers.gradient_batch + bias_head * numbers.gradient_head;
    var all = vec4<f32>(0.0);

    for (var batch = batch_begin; batch < batch_end; batch++) {
        for (var head = head_begin; head < head_end; head++) {
            let kv_head = (numbers.head_first + head) / numbers.heads_a_key;
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
{{STATISTICS}}
{{SLOPES}}
                }
            }
        }
    }
#if SUM_ROWS
    // eight invocations have a part of each row
    workgroupBarrier();
    tile[8u * ty + tx] = all;
    workgroupBarrier();
    if (tx == 0u) {
        var sum = vec4<f32>(0.0);
        for (var n = 0u; n < 8u; n++) {
            sum = sum + tile[8u * ty + n];
        }
        for (var r = 0u; r < 4u; r++) {
            if (row + r < {{ROWS}}) {
                let at = target_row + {{ROW_PLACE}};
                gradient[at] = gradient[at] + sum[r];
            }
        }
    }
#end
}
