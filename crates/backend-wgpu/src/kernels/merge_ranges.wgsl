// Merges the partial results of ranges of keys into the state of a row, in the order of the ranges.
// A workgroup merges one row.
//
//   m' = max(m, max_s m_s);  ℓ' = ℓ·e^{m−m'} + Σ_s ℓ_s·e^{m_s−m'}
//   acc' = acc·e^{m−m'} + Σ_s acc_s·e^{m_s−m'}
//
// Rows of statistics are those of forward.wgsl: (m, ℓ, ties, any key attended to).

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> range_statistics: array<f32>;
@group(0) @binding(2) var<storage, read> range_acc: array<f32>;
@group(0) @binding(3) var<storage, read_write> statistics: array<f32>;
@group(0) @binding(4) var<storage, read_write> acc: array<f32>;

// Factors of the ranges; 0 for those in which the row attends to no key.
var<workgroup> factors: array<f32, {{MAX_RANGES}}>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = workgroup.x + workgroup.y * params.grid_width;
    if (item >= params.count) {
        return;
    }
    let head = item % params.heads;
    let row = (item / params.heads) % params.rows;
    let batch = item / params.heads / params.rows;
    let at = params.statistics_base + batch * params.statistics_batch + row * params.statistics_row
        + head * params.statistics_head;
    let acc_at = params.acc_base + batch * params.acc_batch + row * params.acc_row
        + head * params.acc_head;
    let range_at = params.range_statistics_base + batch * params.range_statistics_batch
        + row * params.range_statistics_row + head * params.range_statistics_head;
    let range_acc_at = params.range_acc_base + batch * params.range_acc_batch
        + row * params.range_acc_row + head * params.range_acc_head;

    let attended = statistics[at + 3u] != 0.0;
    let before = statistics[at];
    var row_max = before;
    var any = attended;
    for (var range = 0u; range < params.ranges; range++) {
        let of_range = range_at + range * params.statistics_range;
        let highest = range_statistics[of_range];
        if (range_statistics[of_range + 3u] != 0.0) {
            row_max = select(highest, max(row_max, highest), any);
            any = true;
        }
    }
    for (var range = lane; range < params.ranges; range += 64u) {
        let of_range = range_at + range * params.statistics_range;
        let highest = range_statistics[of_range];
        let factor = select(exponential(highest - row_max), 1.0, highest == row_max);
        factors[range] = select(0.0, factor, range_statistics[of_range + 3u] != 0.0);
    }
    workgroupBarrier();

    var sum = 0.0;
    var ties = 0.0;
    var own = vec4<f32>(0.0);
    let columns = vec4<u32>(lane) + vec4<u32>(0u, 64u, 128u, 192u);
    if (attended) {
        let factor = select(exponential(before - row_max), 1.0, before == row_max);
        sum = statistics[at + 1u] * factor;
        ties = select(0.0, statistics[at + 2u], before == row_max);
        for (var n = 0u; n < 4u; n++) {
            if (columns[n] < params.dim) {
                own[n] = acc[acc_at + columns[n]] * factor;
            }
        }
    }
    for (var range = 0u; range < params.ranges; range++) {
        let of_range = range_at + range * params.statistics_range;
        // the accumulator of a range without a key is undefined
        if (range_statistics[of_range + 3u] != 0.0) {
            let factor = factors[range];
            sum = fma(range_statistics[of_range + 1u], factor, sum);
            let is_tie = range_statistics[of_range] == row_max;
            ties = ties + select(0.0, range_statistics[of_range + 2u], is_tie);
            let start = range_acc_at + range * params.acc_range;
            for (var n = 0u; n < 4u; n++) {
                if (columns[n] < params.dim) {
                    own[n] = fma(range_acc[start + columns[n]], factor, own[n]);
                }
            }
        }
    }
    // all invocations have read the row's state
    storageBarrier();
    if (any) {
        for (var n = 0u; n < 4u; n++) {
            if (columns[n] < params.dim) {
                acc[acc_at + columns[n]] = own[n];
            }
        }
        if (lane == 0u) {
            statistics[at] = row_max;
            statistics[at + 1u] = sum;
            statistics[at + 2u] = ties;
            statistics[at + 3u] = 1.0;
        }
    }
}
