// Gradient of a bias with neither query nor key axis: sums the gradients of a range of rows, one
// workgroup per batch row and head of the bias. Ranges after the first add to what those before it
// wrote.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gathered: array<f32>;
@group(0) @binding(2) var<storage, read_write> gradient: array<f32>;

var<workgroup> parts: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let own = workgroup.x + workgroup.y * params.grid_width;
    if (own >= params.count) {
        return;
    }
    var sum = 0.0;
    let end = params.row_first + params.rows;
    for (var row = params.row_first + lane; row < end; row = row + 64u) {
        sum = sum + gathered[own * params.all_rows + row];
    }
    parts[lane] = sum;
    workgroupBarrier();
    if (lane == 0u) {
        var all = select(gradient[own], 0.0, params.row_first == 0u);
        for (var n = 0u; n < 64u; n++) {
            all = all + parts[n];
        }
        gradient[own] = all;
    }
}
