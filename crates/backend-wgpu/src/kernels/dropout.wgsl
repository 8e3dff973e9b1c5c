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

fn philox(first_counter: vec4<u32>, first_key: vec2<u32>) -> vec4<u32> {
    var counter = first_counter;
    var key = first_key;
    for (var round_number = 0u; round_number < 10u; round_number++) {
        let of_x = {{PRODUCT}}(0xd2511f53u, counter.x);
        let of_z = {{PRODUCT}}(0xcd9e8d57u, counter.z);
        counter = vec4<u32>(of_z.y ^ counter.y ^ key.x, of_z.x, of_x.y ^ counter.w ^ key.y, of_x.x);
        key = key + vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return counter;
}

// Positions j of four consecutive keys of the chunk.
struct DropoutKeys {
    low: vec4<u32>,
    high: vec4<u32>,
    // the positions are 4·n … 4·n + 3
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
    return DropoutKeys(low, high, all(low == next) && all(high == vec4<u32>(high.x)));
}

// Philox of query `q` and a block of keys.
fn dropout_words(batch: u32, head: u32, q: u32, block: vec2<u32>) -> vec4<u32> {
    let query = min(q, params.queries - 1u);
    let i_low = block_mask[params.query_rows + 2u * query];
    let i_high = block_mask[params.query_rows + 2u * query + 1u];
    let whole_head = params.dropout_head_first + head;
    let plane = (params.batch_first + batch) * params.dropout_q_heads + whole_head;
    return philox(
        vec4<u32>(i_low, block.x, (i_high << 16u) + block.y, plane),
        vec2<u32>(params.key_low, params.key_high));
}

fn factors_of_words(words: vec4<u32>) -> vec4<f32> {
    let dropped = words < vec4<u32>(params.threshold);
    return select(vec4<f32>(params.keep_scale), vec4<f32>(0.0), dropped);
}

fn block_of(low: u32, high: u32) -> vec2<u32> {
    return vec2<u32>((low >> 2u) | (high << 30u), high >> 2u);
}

// Dropout factors of the probabilities of query `q` and four keys that are one block.
fn keep_factors_of_block(batch: u32, head: u32, q: u32, keys: DropoutKeys) -> vec4<f32> {
    return factors_of_words(dropout_words(batch, head, q, block_of(keys.low.x, keys.high.x)));
}

// Dropout factors of the probabilities of query `q` and any four keys.
fn keep_factors(batch: u32, head: u32, q: u32, keys: DropoutKeys) -> vec4<f32> {
    var words = vec4<u32>(0u);
    var block = vec2<u32>(0u);
    var of_block = vec4<u32>(0u);
    for (var n = 0u; n < 4u; n++) {
        let low = keys.low[n];
        let here = block_of(low, keys.high[n]);
        if (n == 0u || any(here != block)) {
            block = here;
            of_block = dropout_words(batch, head, q, block);
        }
        words[n] = of_block[low & 3u];
    }
    return factors_of_words(words);
}
