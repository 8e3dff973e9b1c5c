// Forward epilogue of a row: adds the sinks a_t.
//
//   m' = max(m, max_t a_t);  ℓ' = ℓ·e^{m−m'} + Σ_t e^{a_t−m'};  lse = m' + ln ℓ'
//
// Replaces the row's statistics by (factor of acc, …, any key attended to), which copy.wgsl
// applies.
//
// A row takes two steps for each sink: all maxima, then all terms of the sum. A launch does a range
// of them for a range of rows. Between launches lse holds the maximum, and the statistics are
// (m, ℓ, ties, state), from the first term on (factor of acc, ℓ', ties, state); state 0 means that
// the row is empty, 1 that it attended to a key, 2 that it has sinks only.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> statistics: array<f32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> lse: array<u32>;
#if SUMS
@group(0) @binding(4) var<storage, read_write> max_out: array<u32>;
@group(0) @binding(5) var<storage, read_write> sums: array<u32>;
#end
#if UNNORMALIZED
@group(0) @binding(6) var<storage, read_write> counts: array<u32>;
#end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let group = params.group_first + workgroup.x + workgroup.y * params.grid_width;
    let item = group * 64u + lane;
    if (item >= params.count) {
        return;
    }
    let head = item % params.heads;
    let row = (item / params.heads) % params.all_rows;
    let batch = item / params.heads / params.all_rows;
    let to = (batch * params.heads + head) * params.all_rows + row;
    let at = 4u * item;

    var state = statistics[at + 3u];
    var row_max = statistics[at];
    if (params.step_first != 0u) {
        row_max = bitcast<f32>(lse[to]);
    }
    for (var t = params.step_first; t < min(params.step_end, params.sinks); t++) {
        let sink = sinks[head * params.sinks_head + t];
        if (!is_negative_infinity(sink)) {
            row_max = select(sink, max(row_max, sink), state != 0.0);
            state = select(2.0, state, state != 0.0);
        }
    }
    if (params.step_end <= params.sinks && params.sinks != 0u) {
        lse[to] = bitcast<u32>(row_max);
        statistics[at + 3u] = state;
        return;
    }
    if (state == 0.0) {
        statistics[at + 3u] = 0.0;
        lse[to] = NEGATIVE_INFINITY;
#if SUMS
        max_out[to] = NEGATIVE_INFINITY;
        sums[to] = 0u;
#end
#if UNNORMALIZED
        counts[to] = 0u;
#end
        return;
    }
    let attended = state == 1.0;
    var rescale = 0.0;
    var sum = 0.0;
    var ties = 0.0;
    if (params.step_first > params.sinks) {
        rescale = statistics[at];
        sum = statistics[at + 1u];
        ties = statistics[at + 2u];
    } else if (attended) {
        let before = statistics[at];
        rescale = select(exponential(before - row_max), 1.0, before == row_max);
        sum = statistics[at + 1u] * rescale;
        ties = select(0.0, statistics[at + 2u], before == row_max);
    }
    let term_first = max(params.step_first, params.sinks) - params.sinks;
    for (var t = term_first; t < params.step_end - params.sinks; t++) {
        let sink = sinks[head * params.sinks_head + t];
        if (!is_negative_infinity(sink)) {
            sum = sum + exponential(sink - row_max);
            ties = ties + select(0.0, 1.0, sink == row_max);
        }
    }
    if (params.step_end < 2u * params.sinks) {
        lse[to] = bitcast<u32>(row_max);
        statistics[at] = rescale;
        statistics[at + 1u] = sum;
        statistics[at + 2u] = ties;
        statistics[at + 3u] = state;
        return;
    }
    // a NaN score is never the maximum, but it is in the row sum and makes all of the row NaN
    let bad = is_nan(sum);
    row_max = select(row_max, sum, bad);
    rescale = select(rescale, sum, bad);
    ties = select(ties, 0.0, bad);
    lse[to] = bitcast<u32>(select(row_max + logarithm(sum), sum, bad));
#if SUMS
    max_out[to] = bitcast<u32>(row_max);
    sums[to] = bitcast<u32>(sum);
#end
#if UNNORMALIZED
    counts[to] = bitcast<u32>(ties);
    statistics[at] = rescale;
#else
    statistics[at] = rescale / sum;
#end
    // acc is undefined if the row attended to sinks only
    statistics[at + 3u] = select(0.0, 1.0, attended || bad);
}
