// What backward knows of each row beforehand: (lse, max, delta, share).
//
//   normalised:     delta = ⟨dout, out⟩ − dlse
//   unnormalised:   delta = −dlse     share = ⟨dout, out⟩ / ties

@group(0) @binding(0) var<uniform> numbers: Numbers;
@group(0) @binding(1) var<storage, read> out_words: array<u32>;
@group(0) @binding(2) var<storage, read> dout_words: array<u32>;
@group(0) @binding(3) var<storage, read> lse: array<u32>;
@group(0) @binding(4) var<storage, read> dlse: array<u32>;
@group(0) @binding(5) var<storage, read> most: array<u32>;
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
    let item = (workgroup.x + workgroup.y * numbers.grid_width) * 64u + lane;
    if (item >= numbers.count) {
        return;
    }
    let head = item % numbers.heads;
    let row = (item / numbers.heads) % numbers.rows;
    let batch = item / numbers.heads / numbers.rows;
    let whole_batch = numbers.batch_first + batch;
    let whole_row = numbers.row_first + row;
    let line = (whole_batch * numbers.heads + head) * numbers.all_rows + whole_row;
    let to = 4u * ((whole_batch * numbers.all_rows + whole_row) * numbers.heads + head);
    let vector = batch * numbers.out_batch + row * numbers.out_row + head * numbers.value_dim;
    let own = lse[line];
    statistics[to] = own;
    statistics[to + 1u] = select(0u, most[line], numbers.normalize == 0u);
    // an empty row has no gradient, whatever dout and dlse say
    if (own == NEGATIVE_INFINITY) {
        statistics[to + 2u] = 0u;
        statistics[to + 3u] = 0u;
        return;
    }
    var product = 0.0;
    for (var c = 0u; c < numbers.value_dim; c++) {
        product = fma(dout_at(numbers.dout_base + vector + c), out_at(numbers.out_base + vector + c), product);
    }
    var slope = 0.0;
    if (numbers.has_dlse != 0u) {
        slope = bitcast<f32>(dlse[line]);
    }
    if (numbers.normalize != 0u) {
        statistics[to + 2u] = bitcast<u32>(product - slope);
        statistics[to + 3u] = 0u;
    } else {
        statistics[to + 2u] = bitcast<u32>(-slope);
        statistics[to + 3u] = bitcast<u32>(product / bitcast<f32>(ties[line]));
    }
}
