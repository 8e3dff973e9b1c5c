// Common part of the tile kernels: tiles of 32 × 32 pairs, 64 invocations with a register tile of 4
// × 4 scores each, 128 with one of 2 × 4, or 256 with one of 1 × 4. Tall tiles of forward have 64 ×
// 32 pairs: with matrices 128 invocations with 4 × 4 each, else 64 with 8 × 4 (`tall_tiles.rs`).
//
// `tile` and `right` stage 32 elements of 32 vectors each, or of 64 queries; then `tile` holds P or
// dX for the second product (`store_tile` of `products.rs` has its layout). `block_mask` has a list
// of runs per tile: (first tile of the other side, number of tiles, tile mask or FULL_TILE).
// `visible_bits` has one word per query of the tile, one bit per key.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> block_mask: array<u32>;

#if !MATRIX
var<workgroup> right: array<vec4<f32>, {{PADDED_VECTORS}}>;
var<workgroup> tile: array<vec4<f32>, {{QUERY_VECTORS}}>;
#end
var<workgroup> visible_bits: array<atomic<u32>, {{QUERY_ROWS}}>;

const FULL_TILE: u32 = 0xffffffffu;

#if DECODE
// Rows of a tile are pairs of a query and one of `packed_heads` heads (`split_kv.rs`).
fn query_of(first: u32, row: u32) -> u32 {
    return first + row / params.packed_heads;
}

fn head_of(head: u32, row: u32) -> u32 {
    return head + row % params.packed_heads;
}

fn is_row(first: u32, row: u32) -> bool {
    return row < params.packed_heads * params.packed_queries
        && query_of(first, row) < params.queries;
}

// Visible keys of a row of a tile.
fn mask_word(mask_index: u32, row: u32) -> u32 {
    if (row >= params.packed_heads * params.packed_queries) {
        return 0u;
    }
    let query = row / params.packed_heads;
    return block_mask[params.bits + params.packed_queries * mask_index + query];
}
#else
fn query_of(first: u32, row: u32) -> u32 {
    return first + row;
}

fn head_of(head: u32, row: u32) -> u32 {
    return head;
}

fn is_row(first: u32, row: u32) -> bool {
    return first + row < params.queries;
}

// Visible keys of a row of a tile.
fn mask_word(mask_index: u32, row: u32) -> u32 {
    return block_mask[params.bits + {{QUERY_ROWS}}u * mask_index + row];
}
#end

// Bits of four pairs, from the lowest bits of a word.
fn four_bits(word: u32) -> vec4<bool> {
    return (vec4<u32>(word) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
}

#if GENERAL
fn bits_of_four(pairs: vec4<bool>) -> u32 {
    let bits = select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), pairs);
    return (bits.x | bits.y) | (bits.z | bits.w);
}

struct Scores {
    s: vec4<f32>,
    ds_dx: vec4<f32>,
    visible: vec4<bool>,
}

fn rounded(x: vec4<f32>) -> vec4<f32> {
#if FOUR_ROWS
    if ({{HAS_ROUNDED_LOGITS}}) {
        return rounded_to_half(x, {{ROUNDS_TO_F16}});
    }
#else
    if ({{ROUNDS_TO_BF16}}) {
        return vec4<f32>(
            from_bf16(to_bf16(x.x)), from_bf16(to_bf16(x.y)),
            from_bf16(to_bf16(x.z)), from_bf16(to_bf16(x.w)));
    }
    if ({{ROUNDS_TO_F16}}) {
        // fewer registers
        return vec4<f32>(
            from_f16(to_f16(x.x)), from_f16(to_f16(x.y)),
            from_f16(to_f16(x.z)), from_f16(to_f16(x.w)));
    }
#end
    return x;
}

#if MATRIX
// Offset of the biases of a query, and those of four keys: their sum is that of a pair.
fn bias_query(batch: u32, head: u32, q: u32, mask_index: u32, k: u32) -> u32 {
    let at = params.bias_base + batch * params.bias_batch + head * params.bias_head;
    return at + min(q, params.queries - 1u) * params.bias_row;
}

fn bias_keys(k: u32) -> vec4<u32> {
    let last = params.keys - 1u;
    return vec4<u32>(
        bias_column(min(k, last)), bias_column(min(k + 1u, last)),
        bias_column(min(k + 2u, last)), bias_column(min(k + 3u, last)));
}

// Offset of the position bias of a query and the first of four keys. The others follow it.
fn position_query(batch: u32, head: u32, q: u32, mask_index: u32, k: u32) -> u32 {
    // of as many rows as a tile has queries
    let at = params.function_at + 32u * min(params.queries, {{QUERY_ROWS}}u) * mask_index;
    return at + 32u * (min(q, params.queries - 1u) & {{LAST_QUERY_ROW}}u) + (k & 31u);
}

// Sum of biases: −∞ if one of them is, as no sum with +∞ or NaN would be.
fn sum_of_biases(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    let is_visible = is_not_negative_infinity(min(a, b));
    return select(bitcast<vec4<f32>>(vec4<u32>(NEGATIVE_INFINITY)), a + b, is_visible);
}
#end

fn bias_column(k: u32) -> u32 {
    return select(block_mask[params.key_rows + 2u * k], 0u, params.bias_keys == 1u);
}

fn bias_of(at: u32, q: u32, k: u32) -> f32 {
    return bitcast<f32>(bias_words[at + min(q, params.queries - 1u) * params.bias_row
        + bias_column(min(k, params.keys - 1u))]);
}

fn position_bias_of(at: u32, q: u32, k: u32) -> f32 {
    let row = min(q, params.queries - 1u) & {{LAST_QUERY_ROW}}u;
    return bitcast<f32>(block_mask[at + 32u * row + (k & 31u)]);
}

fn is_not_negative_infinity(x: vec4<f32>) -> vec4<bool> {
    return bitcast<vec4<u32>>(x) != vec4<u32>(NEGATIVE_INFINITY);
}

// Score epilogue of four pairs of queries `q` and keys `k`, from their products: bias, soft cap,
// rounding. Returns s, ∂s/∂x and the visibility. `mask_index` locates position biases. All loads
// are unconditional, so that they are in flight together.
fn scores(batch: u32, head: u32, q: vec4<u32>, k: vec4<u32>, mask_index: u32, bits: vec4<bool>, product: vec4<f32>) -> Scores {
    var bias = vec4<f32>(0.0);
    var visible = bits;
    if ({{HAS_BIAS}}) {
        let at = params.bias_base + batch * params.bias_batch + head * params.bias_head;
        let loaded = vec4<f32>(
            bias_of(at, q.x, k.x), bias_of(at, q.y, k.y),
            bias_of(at, q.z, k.z), bias_of(at, q.w, k.w));
        bias = select(vec4<f32>(0.0), loaded, bits);
        visible = visible & is_not_negative_infinity(bias);
    }
    if ({{HAS_BIAS_FUNCTION}}) {
        // of as many rows as a tile has queries
        let at = params.function_at + 32u * min(params.queries, {{QUERY_ROWS}}u) * mask_index;
        let loaded = vec4<f32>(
            position_bias_of(at, q.x, k.x), position_bias_of(at, q.y, k.y),
            position_bias_of(at, q.z, k.z), position_bias_of(at, q.w, k.w));
        let here = select(vec4<f32>(0.0), loaded, bits);
        bias = bias + here;
        visible = visible & is_not_negative_infinity(here) & is_not_negative_infinity(bias);
    }
    let is_first = vec4<bool>({{IS_BIAS_FIRST}});
    let before = select(vec4<f32>(0.0), bias, is_first);
    let after = select(bias, vec4<f32>(0.0), is_first);
    let x = fma(vec4<f32>(params.scale), rounded(product), before);
    if ({{HAS_SOFT_CAP}}) {
#if MATRIX
        let t = half_tangents(TWICE_LOG2_E / params.cap * x);
#else
        let y = x / params.cap;
        let t = hyperbolic_tangents(y);
#end
        return Scores(fma(vec4<f32>(params.cap), t, after), fma(-t, t, vec4<f32>(1.0)), visible);
    }
    return Scores(x + after, vec4<f32>(1.0), visible);
}
#end

#if SOFT_CAP
// tanh(x / cap) of four scores, from their products.
fn tangents(product: vec4<f32>) -> vec4<f32> {
#if MATRIX
    return half_tangents(TWICE_LOG2_E * params.scale / params.cap * product);
#else
    return hyperbolic_tangents((params.scale / params.cap) * product);
#end
}
#end
