// The end of the forward pass, row by row: sinks are folded in, once.
//
//   m' = max(m, max_t a_t)   sum' = sum·e^{m−m'} + Σ_t e^{a_t−m'}   lse = m' + ln sum'
//
// The row's statistics become (what acc is multiplied by, …, whether there is anything).

@group(0) @binding(0) var<uniform> numbers: Numbers;
@group(0) @binding(1) var<storage, read_write> statistics: array<f32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> lse: array<u32>;
#if UNNORMALIZED
@group(0) @binding(4) var<storage, read_write> most: array<u32>;
@group(0) @binding(5) var<storage, read_write> sums: array<u32>;
@group(0) @binding(6) var<storage, read_write> counts: array<u32>;
#end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = (workgroup.x + workgroup.y * numbers.grid_width) * 64u + lane;
    if (item >= numbers.count) {
        return;
    }
    let head = item % numbers.heads;
    let row = (item / numbers.heads) % numbers.all_rows;
    let batch = item / numbers.heads / numbers.all_rows;
    let to = (batch * numbers.heads + head) * numbers.all_rows + row;
    let at = 4u * item;

    let seen = statistics[at + 3u] != 0.0;
    let before = statistics[at];
    var greatest = before;
    var any = seen;
    for (var t = 0u; t < numbers.sinks; t++) {
        let sink = sinks[head * numbers.sinks_head + t];
        if (!is_negative_infinity(sink)) {
            greatest = select(sink, max(greatest, sink), any);
            any = true;
        }
    }
    if (!any) {
        statistics[at + 3u] = 0.0;
        lse[to] = NEGATIVE_INFINITY;
#if UNNORMALIZED
        most[to] = NEGATIVE_INFINITY;
        sums[to] = 0u;
        counts[to] = 0u;
#end
        return;
    }
    var rescale = 0.0;
    var sum = 0.0;
    var ties = 0.0;
    if (seen) {
        rescale = select(exponential(before - greatest), 1.0, before == greatest);
        sum = statistics[at + 1u] * rescale;
        ties = select(0.0, statistics[at + 2u], before == greatest);
    }
    for (var t = 0u; t < numbers.sinks; t++) {
        let sink = sinks[head * numbers.sinks_head + t];
        if (!is_negative_infinity(sink)) {
            sum = sum + exponential(sink - greatest);
            ties = ties + select(0.0, 1.0, sink == greatest);
        }
    }
    // a NaN that was seen is nobody's maximum, but it is in the sum
    greatest = select(greatest, sum, is_nan(sum));
    lse[to] = bitcast<u32>(select(greatest + logarithm(sum), sum, is_nan(sum)));
#if UNNORMALIZED
    most[to] = bitcast<u32>(greatest);
    sums[to] = bitcast<u32>(sum);
    counts[to] = bitcast<u32>(ties);
    statistics[at] = rescale;
#else
    statistics[at] = rescale / sum;
#end
    // acc means nothing where only sinks were seen
    statistics[at + 3u] = select(0.0, 1.0, seen);
}
