// Dropout: factors of probabilities, by Philox 4×32-10 (Salmon et al. 2011).
//
//   word j mod 4 of Philox(query i, block ⌊j / 4⌋, plane) < threshold: 0, else keep_scale
//
// One Philox has the words of four keys. A register tile's four keys are usually such a block: one
// Philox for each row.

// Low and high half of a product, from products of 16 bits.
fn product_by_halves(a: u32, b: u32) -> vec2<u32> {
    let a_low = a & 0xffffu;
    let a_high = a >> 16u;
    let b_low = b & 0xffffu;
    let b_high = b >> 16u;
    let low = a_low * b_low;
    let middle = a_high * b_low + (low >> 16u);
    let other = a_low * b_high + (middle & 0xffffu);
    return vec2<u32>(a * b, a_high * b_high + (middle >> 16u) + (other >> 16u));
}

#if WIDE_PRODUCTS
// As product_by_halves, by one instruction of devices with 64-bit integers.
fn wide_product(a: u32, b: u32) -> vec2<u32> {
    let product = u64(a) * u64(b);
    return vec2<u32>(u32(product), u32(product >> 32u));
}
#end

const PHILOX_X: u32 = 0xd2511f53u;
const PHILOX_Z: u32 = 0xcd9e8d57u;
// Additions to the key, per round.
const PHILOX_STEP: vec2<u32> = vec2<u32>(0x9e3779b9u, 0xbb67ae85u);

fn philox_round(counter: vec4<u32>, key: vec2<u32>) -> vec4<u32> {
    let of_x = {{PRODUCT}}(PHILOX_X, counter.x);
    let of_z = {{PRODUCT}}(PHILOX_Z, counter.z);
    return vec4<u32>(of_z.y ^ counter.y ^ key.x, of_z.x, of_x.y ^ counter.w ^ key.y, of_x.x);
}

fn dropout_key() -> vec2<u32> {
    return vec2<u32>(params.key_low, params.key_high);
}

fn dropout_plane(batch: u32, head: u32) -> u32 {
    let whole_head = params.dropout_head_first + head;
    return (params.batch_first + batch) * params.dropout_q_heads + whole_head;
}

// Offset of the position i of query `q` in the block mask: its low half, then its high half.
fn query_at(q: u32) -> u32 {
    return params.query_rows + 2u * min(q, params.queries - 1u);
}

#if WIDE_PRODUCTS
// Positions j of four consecutive keys of the chunk.
struct DropoutKeys {
    low: vec4<u32>,
    high: vec4<u32>,
    // the positions are 4·n … 4·n + 3, below 2^32
    are_one_block: bool,
}

// Positions of keys `k` … `k + 3`. Keys beyond the chunk have that of the last one: their pairs are
// masked.
fn dropout_keys(k: u32) -> DropoutKeys {
    let last = vec4<u32>(params.keys - 1u);
    let at = vec4<u32>(params.key_rows)
        + 2u * min(vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u), last);
    let low = vec4<u32>(
        block_mask[at.x], block_mask[at.y], block_mask[at.z], block_mask[at.w]);
    let high = vec4<u32>(
        block_mask[at.x + 1u], block_mask[at.y + 1u], block_mask[at.z + 1u], block_mask[at.w + 1u]);
    let next = vec4<u32>(low.x & 0xfffffffcu) + vec4<u32>(0u, 1u, 2u, 3u);
    return DropoutKeys(low, high, all(low == next) && all(high == vec4<u32>(0u)));
}

fn factors_of_words(words: vec4<u32>) -> vec4<f32> {
    let dropped = words < vec4<u32>(params.threshold);
    return select(vec4<f32>(params.keep_scale), vec4<f32>(0.0), dropped);
}

// Dropout factors of the probabilities of query `q` and any four keys.
fn keep_factors(batch: u32, head: u32, q: u32, keys: DropoutKeys) -> vec4<f32> {
    let at = query_at(q);
    let i_high = block_mask[at + 1u] << 16u;
    var words = vec4<u32>(0u);
    var block = vec2<u32>(0u);
    var of_block = vec4<u32>(0u);
    for (var n = 0u; n < 4u; n++) {
        let low = keys.low[n];
        let here = vec2<u32>((low >> 2u) | (keys.high[n] << 30u), keys.high[n] >> 2u);
        if (n == 0u || any(here != block)) {
            block = here;
            var key = dropout_key();
            of_block =
                vec4<u32>(block_mask[at], block.x, i_high + block.y, dropout_plane(batch, head));
            for (var round_number = 0u; round_number < 10u; round_number++) {
                of_block = philox_round(of_block, key);
                key = key + PHILOX_STEP;
            }
        }
        words[n] = of_block[low & 3u];
    }
    return factors_of_words(words);
}

// Positions below 2^32: counter z is 0, so its product is, and the first rounds have products of
// the query alone or the block alone. Of 20 products, 15 are of both.
//
//   round 1:  a = X·i
//   round 2:  b = Z·(high(a) ^ plane ^ key.y),  k = X·(block ^ key.x)
//   round 3:  c = X·(high(b) ^ key.x),  Z·(high(k) ^ low(a) ^ key.y)
//
// Returns (low(a), low(b), high(c) ^ key.y, low(c)) of query `q`.
fn query_rounds(batch: u32, head: u32, q: u32) -> vec4<u32> {
    let key = dropout_key();
    let a = wide_product(PHILOX_X, block_mask[query_at(q)]);
    let b = wide_product(PHILOX_Z, a.y ^ dropout_plane(batch, head) ^ key.y);
    let c = wide_product(PHILOX_X, b.y ^ (key.x + PHILOX_STEP.x));
    return vec4<u32>(a.x, b.x, c.y ^ (key.y + 2u * PHILOX_STEP.y), c.x);
}

// Returns (high(k) ^ key.y, low(k)) of keys that are one block.
fn block_rounds(keys: DropoutKeys) -> vec2<u32> {
    let key = dropout_key();
    let k = wide_product(PHILOX_X, (keys.low.x >> 2u) ^ key.x);
    return vec2<u32>(k.y ^ (key.y + PHILOX_STEP.y), k.x);
}

// Dropout factors of the probabilities of a query and a block of keys, after these rounds.
fn keep_factors_of_block(of_query: vec4<u32>, of_block: vec2<u32>) -> vec4<f32> {
    var key = dropout_key() + 2u * PHILOX_STEP;
    let z = wide_product(PHILOX_Z, of_block.x ^ of_query.x);
    var words = vec4<u32>(z.y ^ of_query.y ^ key.x, z.x, of_query.z ^ of_block.y, of_query.w);
    for (var round_number = 3u; round_number < 10u; round_number++) {
        key = key + PHILOX_STEP;
        words = philox_round(words, key);
    }
    return factors_of_words(words);
}

fn is_query_low(q: u32) -> bool {
    return block_mask[query_at(q) + 1u] == 0u;
}

// As keep_factors, by these rounds if the keys are one block.
fn keep_factors_of_row(batch: u32, head: u32, q: u32, keys: DropoutKeys) -> vec4<f32> {
    var factors = vec4<f32>(1.0);
    let are_one_block = keys.are_one_block && is_query_low(q);
    if (are_one_block) {
        factors = keep_factors_of_block(query_rounds(batch, head, q), block_rounds(keys));
    } else {
        factors = keep_factors(batch, head, q, keys);
    }
    return factors;
}
#else
// Dropout factors of the probabilities of query `q` and keys `k` … `k + 3`, or of as many keys as
// the register tile has rows, if its rows are keys.
fn keep_factors(batch: u32, head: u32, q: u32, k: u32) -> vec4<f32> {
    let at = query_at(q);
    let i_low = block_mask[at];
    let i_high = block_mask[at + 1u];
    let plane = dropout_plane(batch, head);
    var all = vec4<f32>(0.0);
    var block = vec2<u32>(0u);
    var words = vec4<u32>(0u);
#if ROWS_ARE_KEYS
    for (var n = 0u; n < {{TILE_ROWS}}u; n++) {
#else
    for (var n = 0u; n < 4u; n++) {
#end
        if (k + n < params.keys) {
            let j_low = block_mask[params.key_rows + 2u * (k + n)];
            let j_high = block_mask[params.key_rows + 2u * (k + n) + 1u];
            let here = vec2<u32>((j_low >> 2u) | (j_high << 30u), j_high >> 2u);
            if (n == 0u || any(here != block)) {
                block = here;
                var key = dropout_key();
                words = vec4<u32>(i_low, block.x, (i_high << 16u) + block.y, plane);
                for (var round_number = 0u; round_number < 10u; round_number++) {
                    words = philox_round(words, key);
                    key = key + PHILOX_STEP;
                }
            }
            all[n] = select(params.keep_scale, 0.0, words[j_low & 3u] < params.threshold);
        }
    }
    return all;
}
#end
