// Copies vectors between strided tensors [batch, row, head, element], with optional widening,
// scaling and rounding.
//
// 2-byte elements share words: a single one is written by two atomic operations that keep its
// neighbour.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>;
#if !ADD
@group(0) @binding(2) var<storage, read_write> sink: array<atomic<u32>>;
#else
@group(0) @binding(2) var<storage, read_write> sink: array<u32>;
#end
#if ROW_FACTORS
@group(0) @binding(3) var<storage, read> factors: array<f32>;
#end

fn half_at(at: u32) -> u32 {
    return (source[at >> 1u] >> (16u * (at & 1u))) & 0xffffu;
}

#if !RAW
fn number_at(at: u32) -> f32 {
#if FROM_HALF
    return {{FROM_BITS}}(half_at(at));
#else
    return bitcast<f32>(source[at]);
#end
}
#end

// Returns the bits to store for the element at `at`.
fn element(at: u32, factor: f32, empty: bool) -> u32 {
#if RAW
#if INTO_HALF
    return half_at(at);
#else
    return source[at];
#end
#else
    let number = select(factor * number_at(at), 0.0, empty);
#if INTO_HALF
    return {{TO_BITS}}(number);
#else
    return bitcast<u32>(number);
#end
#end
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = (workgroup.x + workgroup.y * params.grid_width) * 64u + lane;
    if (item >= params.count) {
        return;
    }
    let index = item % params.dim;
    let vector = item / params.dim;
    let head = vector % params.heads;
    let row = (vector / params.heads) % params.rows;
    let batch = vector / params.heads / params.rows;
    let step = 1u + params.pairs;
    let at = params.from_base + batch * params.from_batch + row * params.from_row + head * params.from_head + step * index;
    let to = params.into_base + batch * params.into_batch + row * params.into_row + head * params.into_head + step * index;
    var factor = params.factor;
    var empty = false;
#if ROW_FACTORS
    let line = params.factors_base + batch * params.factors_batch + row * params.factors_row + head * params.factors_head;
    factor = factors[line];
    empty = factors[line + 3u] == 0.0;
#end
#if ADD
    sink[to] = bitcast<u32>(bitcast<f32>(sink[to]) + bitcast<f32>(source[at]));
#else
#if INTO_HALF
    if (params.pairs != 0u) {
        atomicStore(&sink[to >> 1u], element(at, factor, empty) | (element(at + 1u, factor, empty) << 16u));
    } else {
        let shift = 16u * (to & 1u);
        atomicAnd(&sink[to >> 1u], ~(0xffffu << shift));
        atomicOr(&sink[to >> 1u], element(at, factor, empty) << shift);
    }
#else
    atomicStore(&sink[to], element(at, factor, empty));
#end
#end
}
