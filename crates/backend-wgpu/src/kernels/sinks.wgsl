// dsinks of a range of the local rows and, if all heads share the sinks, of a range of the heads
// (the steps); one workgroup per sink:
// da_t = −Σ_i (e^{a_t − max_i}/sum_i·Δ_i + [a_t = max_i]·share_i).
// Rows are those of all batch rows. Ranges after the first add to what those before it wrote.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> statistics: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> gradient: array<f32>;

var<workgroup> parts: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let own = params.group_first + workgroup.x + workgroup.y * params.grid_width;
    if (own >= params.count) {
        return;
    }
    let sink = sinks[own];
    let own_head = own / params.sinks;
    let end = params.row_first + params.rows;
    var sum = 0.0;
    // a sink of −∞ contributes nothing
    if (!is_negative_infinity(sink)) {
        for (var row = params.row_first + lane; row < end; row = row + 64u) {
            let head_begin = select(own_head, params.step_first, params.sinks_head == 0u);
            let head_end = select(own_head + 1u, params.step_end, params.sinks_head == 0u);
            for (var head = head_begin; head < head_end; head++) {
                let at = 4u * (row * params.heads + head);
                let row_max = bitcast<f32>(statistics[at]);
                let p = exponential(sink - row_max) * bitcast<f32>(statistics[at + 1u]);
                var part = p * bitcast<f32>(statistics[at + 2u]);
                if (params.normalize == 0u && sink == row_max) {
                    part = part + bitcast<f32>(statistics[at + 3u]);
                }
                sum = sum - part;
            }
        }
    }
    parts[lane] = sum;
    workgroupBarrier();
    if (lane == 0u) {
        let is_first = params.row_first == 0u && params.step_first == 0u;
        var all = select(gradient[own], 0.0, is_first);
        for (var n = 0u; n < 64u; n++) {
            all = all + parts[n];
        }
        gradient[own] = all;
    }
}
