// Backward prologue of a row: (max, 1 / sum, Δ, share), of an empty row (+∞, 0, 0, 0).
//
//   normalized:     Δ = ⟨dout, out⟩ − dlse
//   unnormalized:   Δ = −dlse;  share = ⟨dout, out⟩ / ties
//
// Of partial results, dlse and ties are −Δ and −share of the whole attention, and out is not read.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> out_words: array<u32>;
@group(0) @binding(2) var<storage, read> dout_words: array<u32>;
@group(0) @binding(3) var<storage, read> max_in: array<u32>;
@group(0) @binding(4) var<storage, read> sums: array<u32>;
@group(0) @binding(5) var<storage, read> dlse: array<u32>;
@group(0) @binding(6) var<storage, read> ties: array<u32>;
@group(0) @binding(7) var<storage, read_write> statistics: array<u32>;

fn out_at(at: u32) -> f32 {
    return {{LOAD_OUT}};
}

fn dout_at(at: u32) -> f32 {
    return {{LOAD_DOUT}};
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = (workgroup.x + workgroup.y * params.grid_width) * 64u + lane;
    if (item >= params.count) {
        return;
    }
    let head = item % params.heads;
    let row = (item / params.heads) % params.rows;
    let batch = item / params.heads / params.rows;
    let whole_batch = params.batch_first + batch;
    let whole_row = params.row_first + row;
    let line = (whole_batch * params.heads + head) * params.all_rows + whole_row;
    let to = 4u * ((whole_batch * params.all_rows + whole_row) * params.heads + head);
    let vector = batch * params.out_batch + row * params.out_row + head * params.value_dim;
    let row_max = max_in[line];
    // a row without a visible key has no gradient, for any dout and dlse
    if (row_max == NEGATIVE_INFINITY) {
        statistics[to] = POSITIVE_INFINITY;
        statistics[to + 1u] = 0u;
        statistics[to + 2u] = 0u;
        statistics[to + 3u] = 0u;
        return;
    }
    var sum = 1.0;
    if (params.has_sum != 0u) {
        sum = bitcast<f32>(sums[line]);
    }
    statistics[to] = row_max;
    statistics[to + 1u] = bitcast<u32>(1.0 / sum);
    var product = 0.0;
    if (params.partial == 0u) {
        for (var c = 0u; c < params.value_dim; c++) {
            let out = out_at(params.out_base + vector + c);
            product = fma(dout_at(params.dout_base + vector + c), out, product);
        }
    }
    var dlse_of_row = 0.0;
    if (params.has_dlse != 0u) {
        dlse_of_row = bitcast<f32>(dlse[line]);
    }
    if (params.normalize != 0u) {
        statistics[to + 2u] = bitcast<u32>(product - dlse_of_row);
        statistics[to + 3u] = 0u;
    } else {
        statistics[to + 2u] = bitcast<u32>(-dlse_of_row);
        let of_max = bitcast<f32>(ties[line]);
        statistics[to + 3u] = bitcast<u32>(select(product / of_max, -of_max, params.partial != 0u));
    }
}
