// Folds a block of keys and values into the running softmax of one tile of queries of one head.
//
//   m' = max(m, max_j s_j)   sum ← sum·e^{m−m'} + Σ_j e^{s_j−m'}   acc ← acc·e^{m−m'} + Σ_j keep_j·e^{s_j−m'}·v_j
//
// A row of statistics is (m, sum, ties, whether anything was seen at all); acc and m mean nothing before something was seen.

#if !SUBGROUP
var<workgroup> columns: array<f32, 256>;
#end

// The largest of the eight numbers that the invocations of one group of rows have for the row `row`.
fn largest(row: u32, tx: u32, own: vec4<f32>) -> vec4<f32> {
#if SUBGROUP
    var all = own;
    all = max(all, subgroupShuffleXor(all, 1u));
    all = max(all, subgroupShuffleXor(all, 2u));
    return max(all, subgroupShuffleXor(all, 4u));
#else
    for (var r = 0u; r < 4u; r++) {
        columns[8u * (row + r) + tx] = own[r];
    }
    workgroupBarrier();
    var all = own;
    for (var r = 0u; r < 4u; r++) {
        for (var n = 0u; n < 8u; n++) {
            all[r] = max(all[r], columns[8u * (row + r) + n]);
        }
    }
    workgroupBarrier();
    return all;
#end
}

// Their sum, in a fixed order.
fn total(row: u32, tx: u32, own: vec4<f32>) -> vec4<f32> {
#if SUBGROUP
    var all = own;
    all = all + subgroupShuffleXor(all, 1u);
    all = all + subgroupShuffleXor(all, 2u);
    return all + subgroupShuffleXor(all, 4u);
#else
    for (var r = 0u; r < 4u; r++) {
        columns[8u * (row + r) + tx] = own[r];
    }
    workgroupBarrier();
    var all = vec4<f32>(0.0);
    for (var r = 0u; r < 4u; r++) {
        for (var n = 0u; n < 8u; n++) {
            all[r] = all[r] + columns[8u * (row + r) + n];
        }
    }
    workgroupBarrier();
    return all;
#end
}

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
    var greatest = vec4<f32>(0.0);
    var sum = vec4<f32>(0.0);
    var ties = vec4<f32>(0.0);
    var any_seen = vec4<bool>(false);
    for (var r = 0u; r < 4u; r++) {
        if (row + r < numbers.queries) {
            let at = state + (row + r) * numbers.statistics_row;
            any_seen[r] = statistics[at + 3u] != 0.0;
            if (any_seen[r]) {
                greatest[r] = statistics[at];
                // one of the eight invocations carries what was there before
                if (tx == 0u) {
                    sum[r] = statistics[at + 1u];
                    ties[r] = statistics[at + 2u];
                }
            }
        }
    }
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
            // column `first` of a row of weights is key `column`
            let key = column + 4u * tx;
            var most = vec4<f32>(-3.4028234e38);
            var words = vec4<u32>(0u);
            for (var r = 0u; r < 4u; r++) {
                words[r] = atomicLoad(&seen[4u * ty + r]) >> (4u * tx);
            }
{{PAIRS}}
#if GENERAL
            workgroupBarrier();
#end
            for (var r = 0u; r < 4u; r++) {
                words[r] = atomicLoad(&seen[4u * ty + r]);
            }
            most = largest(4u * ty, tx, most);
            let here = words != vec4<u32>(0u);
            let higher = select(most, select(greatest, max(greatest, most), here), any_seen);
            let factor = select(vec4<f32>(0.0), vec4<f32>(
                exponential(greatest.x - higher.x), exponential(greatest.y - higher.y),
                exponential(greatest.z - higher.z), exponential(greatest.w - higher.w)), any_seen);
            let rescale = select(factor, vec4<f32>(1.0), (greatest == higher) & any_seen);
            ties = select(vec4<f32>(0.0), ties, (greatest == higher) & any_seen);
            greatest = higher;
            any_seen = any_seen | here;
            sum = sum * rescale;
{{WEIGHTS}}
{{RESCALE_SUMS}}
            let is_edge = edge != NO_EDGE;
{{ACCUMULATE}}
        }
    }

    sum = total(4u * ty, tx, sum);
    ties = total(4u * ty, tx, ties);
    for (var r = 0u; r < 4u; r++) {
        if (row + r < numbers.queries && any_seen[r]) {
            if (tx == 0u) {
                let at = state + (row + r) * numbers.statistics_row;
                statistics[at] = greatest[r];
                statistics[at + 1u] = sum[r];
                statistics[at + 2u] = ties[r];
                statistics[at + 3u] = 1.0;
            }
        }
    }
{{STORE_SUMS}}
}
