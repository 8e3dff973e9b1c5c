// What the kernels over tiles share: 32 × 32 pairs, 64 invocations, each with 4 rows × 4 columns of a product in registers.
//
// `left` and `right` hold 32 elements of 32 vectors each, on their way into a product; `tile` holds weights, `[column][row]`, for the second
// product. A plane and a tile of it have a list, which begins where `sight` says and ends where the next one begins: runs of neighbouring tiles
// of the other side (the first, how many, their edge). `seen` has one word a query of the tile, one bit a key.

@group(0) @binding(0) var<uniform> numbers: Numbers;
@group(0) @binding(1) var<storage, read> sight: array<u32>;

#if !MATRIX
var<workgroup> left: array<vec4<f32>, 256>;
var<workgroup> right: array<vec4<f32>, 256>;
#end
var<workgroup> tile: array<vec4<f32>, 256>;
var<workgroup> seen: array<atomic<u32>, 32>;

const NO_EDGE: u32 = 0xffffffffu;

struct Pair {
    logit: f32,
    slope: f32,
    visible: bool,
}

#if GENERAL
fn rounded(x: f32) -> f32 {
    if (numbers.logits_dtype == 1u) {
        return from_bf16(to_bf16(x));
    }
    if (numbers.logits_dtype == 2u) {
        return from_f16(to_f16(x));
    }
    return x;
}
#end

// The logit of query `q` and key `k` of the window, whose place in the tile is `edge`, from their product.
fn pair(batch: u32, head: u32, q: u32, k: u32, edge: u32, bit: bool, product: f32) -> Pair {
#if GENERAL
    var bias = 0.0;
    var visible = bit;
    if (numbers.has_bias != 0u && bit) {
        let column = select(sight[numbers.key_rows + 2u * k], 0u, numbers.bias_keys == 1u);
        bias = bitcast<f32>(bias_words[numbers.bias_base + batch * numbers.bias_batch + head * numbers.bias_head + q * numbers.bias_row + column]);
    }
    if (numbers.function_at != 0u && bit) {
        let more = bitcast<f32>(sight[numbers.function_at + 1024u * edge + 32u * (q & 31u) + (k & 31u)]);
        if (is_negative_infinity(more)) {
            visible = false;
        }
        bias = bias + more;
    }
    if (is_negative_infinity(bias)) {
        visible = false;
    }
    let before = select(0.0, bias, numbers.bias_first != 0u);
    let after = select(bias, 0.0, numbers.bias_first != 0u);
    let x = fma(numbers.scale, rounded(product), before);
    if (numbers.cap > 0.0) {
        let t = hyperbolic_tangent(x / numbers.cap);
        return Pair(fma(numbers.cap, t, after), fma(-t, t, 1.0), visible);
    }
    return Pair(x + after, 1.0, visible);
#else
    return Pair(numbers.scale * product, 1.0, bit);
#end
}

// What dropout multiplies the weights of query `q` and keys `k`, …, k + 3 by.
fn kept(batch: u32, head: u32, q: u32, k: u32) -> vec4<f32> {
#if GENERAL
    if (numbers.threshold == 0u) {
        return vec4<f32>(1.0);
    }
    let i_low = sight[numbers.query_rows + 2u * q];
    let i_high = sight[numbers.query_rows + 2u * q + 1u];
    let plane = (numbers.batch_first + batch) * numbers.all_heads + numbers.head_first + head;
    var all = vec4<f32>(0.0);
    var block = vec2<u32>(0u);
    var words = vec4<u32>(0u);
    for (var n = 0u; n < 4u; n++) {
        if (k + n < numbers.keys) {
            let j_low = sight[numbers.key_rows + 2u * (k + n)];
            let j_high = sight[numbers.key_rows + 2u * (k + n) + 1u];
            let here = vec2<u32>((j_low >> 2u) | (j_high << 30u), j_high >> 2u);
            if (n == 0u || any(here != block)) {
                block = here;
                let counter = vec4<u32>(i_low, block.x, (i_high << 16u) + block.y, plane);
                words = philox(counter, vec2<u32>(numbers.key_low, numbers.key_high));
            }
            all[n] = select(numbers.keep_scale, 0.0, words[j_low & 3u] < numbers.threshold);
        }
    }
    return all;
#else
    return vec4<f32>(1.0);
#end
}
