// Copies vectors of one strided tensor into another of the same [batch, row, head, element], widening, scaling and rounding on the way.
//
// Elements of 2 bytes share words: a lone one is put in place by two atomic operations that leave its neighbour alone.

@group(0) @binding(0) var<uniform> numbers: Numbers;
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

// The bits that go to the target for the element at `at`.
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
    let item = (workgroup.x + workgroup.y * numbers.grid_width) * 64u + lane;
    if (item >= numbers.count) {
        return;
    }
    let place = item % numbers.dim;
    let vector = item / numbers.dim;
    let head = vector % numbers.heads;
    let row = (vector / numbers.heads) % numbers.rows;
    let batch = vector / numbers.heads / numbers.rows;
    let step = 1u + numbers.pairs;
    let at = numbers.from_base + batch * numbers.from_batch + row * numbers.from_row + head * numbers.from_head + step * place;
    let to = numbers.into_base + batch * numbers.into_batch + row * numbers.into_row + head * numbers.into_head + step * place;
    var factor = numbers.factor;
    var empty = false;
#if ROW_FACTORS
    let line = numbers.factors_base + batch * numbers.factors_batch + row * numbers.factors_row + head * numbers.factors_head;
    factor = factors[line];
    empty = factors[line + 3u] == 0.0;
#end
#if ADD
    sink[to] = bitcast<u32>(bitcast<f32>(sink[to]) + bitcast<f32>(source[at]));
#else
#if INTO_HALF
    if (numbers.pairs != 0u) {
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
