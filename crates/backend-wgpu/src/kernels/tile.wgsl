// Common part of the tile kernels: tiles of 32 × 32 pairs, 64 invocations with a register tile of 4
// × 4 scores each.
//
// `left` and `right` stage 32 elements of 32 vectors each; `tile` holds P or dX, `[column][row]`,
// for the second product. `block_mask` has a list of runs per tile: (first tile of the other side,
// number of tiles, tile mask or FULL_TILE). `visible_bits` has one word per query of the tile, one
// bit per key.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> block_mask: array<u32>;

#if !MATRIX
var<workgroup> left: array<vec4<f32>, {{PADDED_VECTORS}}>;
var<workgroup> right: array<vec4<f32>, {{PADDED_VECTORS}}>;
#end
var<workgroup> tile: array<vec4<f32>, 256>;
var<workgroup> visible_bits: array<atomic<u32>, 32>;

const FULL_TILE: u32 = 0xffffffffu;

struct Score {
    s: f32,
    ds_dx: f32,
    visible: bool,
}

#if GENERAL
fn rounded(x: f32) -> f32 {
    if (params.logits_dtype == 1u) {
        return from_bf16(to_bf16(x));
    }
    if (params.logits_dtype == 2u) {
        return from_f16(to_f16(x));
    }
    return x;
}
#end

// Score epilogue of the pair of query `q` and key `k`, from their product: bias, soft cap,
// rounding. Returns s, ∂s/∂x and the visibility. `mask_index` locates position biases.
fn score(batch: u32, head: u32, q: u32, k: u32, mask_index: u32, bit: bool, product: f32) -> Score {
#if GENERAL
    var bias = 0.0;
    var visible = bit;
    if (params.has_bias != 0u && bit) {
        let column = select(block_mask[params.key_rows + 2u * k], 0u, params.bias_keys == 1u);
        bias = bitcast<f32>(bias_words[params.bias_base + batch * params.bias_batch + head * params.bias_head + q * params.bias_row + column]);
    }
    if (params.function_at != 0u && bit) {
        let position_bias = bitcast<f32>(block_mask[params.function_at + 1024u * mask_index + 32u * (q & 31u) + (k & 31u)]);
        if (is_negative_infinity(position_bias)) {
            visible = false;
        }
        bias = bias + position_bias;
    }
    if (is_negative_infinity(bias)) {
        visible = false;
    }
    let before = select(0.0, bias, params.bias_first != 0u);
    let after = select(bias, 0.0, params.bias_first != 0u);
    let x = fma(params.scale, rounded(product), before);
    if (params.cap > 0.0) {
        let t = hyperbolic_tangent(x / params.cap);
        return Score(fma(params.cap, t, after), fma(-t, t, 1.0), visible);
    }
    return Score(x + after, 1.0, visible);
#else
    return Score(params.scale * product, 1.0, bit);
#end
}

// Returns the dropout factors of the probabilities of query `q` and keys `k` … `k + 3`.
fn keep_factors(batch: u32, head: u32, q: u32, k: u32) -> vec4<f32> {
#if GENERAL
    if (params.threshold == 0u) {
        return vec4<f32>(1.0);
    }
    let query = min(q, params.queries - 1u);
    let i_low = block_mask[params.query_rows + 2u * query];
    let i_high = block_mask[params.query_rows + 2u * query + 1u];
    let plane = (params.batch_first + batch) * params.q_heads + params.head_first + head;
    var all = vec4<f32>(0.0);
    var block = vec2<u32>(0u);
    var words = vec4<u32>(0u);
    for (var n = 0u; n < 4u; n++) {
        if (k + n < params.keys) {
            let j_low = block_mask[params.key_rows + 2u * (k + n)];
            let j_high = block_mask[params.key_rows + 2u * (k + n) + 1u];
            let here = vec2<u32>((j_low >> 2u) | (j_high << 30u), j_high >> 2u);
            if (n == 0u || any(here != block)) {
                block = here;
                let counter = vec4<u32>(i_low, block.x, (i_high << 16u) + block.y, plane);
                words = philox(counter, vec2<u32>(params.key_low, params.key_high));
            }
            all[n] = select(params.keep_scale, 0.0, words[j_low & 3u] < params.threshold);
        }
    }
    return all;
#else
    return vec4<f32>(1.0);
#end
}
