// Forward: updates the online softmax of one tile of queries of one head with a block of keys.
//
//   for each visible tile of keys:
//       S = scale·Q·Kᵀ, score epilogue;  m' = max(m, rowmax(S));  P = e^{S−m'}
//       ℓ = ℓ·e^{m−m'} + rowsum(P);  acc = acc·e^{m−m'} + (keep∘P)·V;  m = m'
//
// A row of statistics is (m, ℓ, ties, any key attended to); m and acc are undefined before the
// first. Only kernels of an unnormalized output count ties.

fn greatest(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn sum_of(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

// Row maxima over the eight invocations `ty`, which hold the same rows. Without subgroups they go
// through `tile`, which is idle between the products.
fn largest(ty: u32, tx: u32, own: {{ROW_FLOATS}}) -> {{ROW_FLOATS}} {
#if SUBGROUP
    var all = own;
    all = max(all, subgroupShuffleXor(all, 1u));
    all = max(all, subgroupShuffleXor(all, 2u));
    return max(all, subgroupShuffleXor(all, 4u));
#else
    workgroupBarrier();
    tile[8u * ty + tx] = own{{AS_FOUR}};
    workgroupBarrier();
    var all = own;
    for (var n = 0u; n < 8u; n++) {
        all = max(all, tile[8u * ty + n]{{ROW_PART}});
    }
    workgroupBarrier();
    return all;
#end
}

// Row sums over the same invocations, in a fixed order.
fn total(ty: u32, tx: u32, own: {{ROW_FLOATS}}) -> {{ROW_FLOATS}} {
#if SUBGROUP
    var all = own;
    all = all + subgroupShuffleXor(all, 1u);
    all = all + subgroupShuffleXor(all, 2u);
    return all + subgroupShuffleXor(all, 4u);
#else
    workgroupBarrier();
    tile[8u * ty + tx] = own{{AS_FOUR}};
    workgroupBarrier();
    var all = {{ROW_FLOATS}}(0.0);
    for (var n = 0u; n < 8u; n++) {
        all = all + tile[8u * ty + n]{{ROW_PART}};
    }
    workgroupBarrier();
    return all;
#end
}

// Offset of a row's statistics from those of the batch row, and of its accumulator.
fn statistics_at(first: u32, head: u32, row: u32) -> u32 {
    return query_of(first, row) * params.statistics_row
        + head_of(head, row) * params.statistics_head;
}

fn acc_at(first: u32, head: u32, row: u32) -> u32 {
    return query_of(first, row) * params.acc_row + head_of(head, row) * params.acc_head;
}

@compute @workgroup_size({{INVOCATIONS}})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
#if MATRIX
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
#end
) {
    let group = params.first_group + workgroup.x + workgroup.y * params.grid_width;
    if (group >= params.end_group) {
        return;
    }
    let list_index = {{LIST_INDEX}};
#if DECODE
    // lists of a tile are ranges of its keys
    let tile_index = list_index / params.ranges;
    let range = list_index % params.ranges;
    let head = params.packed_heads * ((group / params.tiles) % params.heads);
#else
    let tile_index = list_index;
    let head = (group / params.tiles) % params.heads;
#end
    let batch = group / params.tiles / params.heads;
    let kv_head = (params.head_first + head) / params.group_heads;
    let ty = lane >> 3u;
    let tx = lane & 7u;
#if DECODE
    let first = params.packed_queries * tile_index;
#else
    let first = {{QUERY_ROWS}}u * tile_index;
#end
    // row of the tile
    let row = {{TILE_ROWS}}u * ty;
{{COUNT_MATRICES}}

    let list = batch * params.plane_batch + head * params.plane_head + list_index;
    let begin = block_mask[params.lists + list];
    let end = block_mask[params.lists + list + 1u];
    if (begin == end) {
        return;
    }

#if DECODE
    let state = params.statistics_base + batch * params.statistics_batch
        + range * params.statistics_range;
    let acc = params.acc_base + batch * params.acc_batch + range * params.acc_range;
#else
    let state = params.statistics_base + batch * params.statistics_batch;
    let acc = params.acc_base + batch * params.acc_batch;
#end
    var row_max = {{ROW_FLOATS}}(0.0);
    var sum = {{ROW_FLOATS}}(0.0);
#if TIES
    var ties = {{ROW_FLOATS}}(0.0);
#end
    var any_visible = {{ROW_BOOLS}}(false);
    for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
        if (is_row(first, row + r)) {
            let at = state + statistics_at(first, head, row + r);
            any_visible[r] = statistics[at + 3u] != 0.0;
            if (any_visible[r]) {
                row_max[r] = statistics[at];
                // the first of eight invocations starts from the stored partial sum
                if (tx == 0u) {
                    sum[r] = statistics[at + 1u];
#if TIES
                    ties[r] = statistics[at + 2u];
#end
                }
            }
        }
    }
{{LOAD_ACC}}
{{OWN_ROWS}}

    for (var run = begin; run < end; run++) {
        let first_tile = block_mask[params.runs + 3u * run];
        let end_tile = first_tile + block_mask[params.runs + 3u * run + 1u];
        let mask_index = block_mask[params.runs + 3u * run + 2u];
        for (var other_tile = first_tile; other_tile < end_tile; other_tile++) {
            let column = 32u * other_tile;
{{TILE_MASK}}
{{SCORES}}
            // invocation (ty, tx) holds keys column + 4·tx … + 3 of its rows
            let key = column + 4u * tx;
            var tile_max = {{ROW_FLOATS}}(-3.4028234e38);
            var words = {{ROW_WORDS}}(0xffffffffu);
{{EPILOGUE}}
            tile_max = largest(ty, tx, tile_max);
            let tile_visible = words != {{ROW_WORDS}}(0u);
            let new_max = select(
                tile_max,
                select(row_max, max(row_max, tile_max), tile_visible),
                any_visible,
            );
            let is_same = (row_max == new_max) & any_visible;
            let factor = select(
                {{ROW_FLOATS}}(0.0),
                {{EXPONENTIALS}}((row_max - new_max){{AS_FOUR}}){{ROW_PART}},
                any_visible,
            );
            let rescale = select(factor, {{ROW_FLOATS}}(1.0), is_same);
#if TIES
            ties = select({{ROW_FLOATS}}(0.0), ties, is_same);
#end
            row_max = new_max;
#if ACC_IN_MEMORY
            let was_visible = any_visible;
#end
            any_visible = any_visible | tile_visible;
            sum = sum * rescale;
{{PROBS}}
{{STORE_PROBS}}
{{RESCALE_ACC}}
{{ACCUMULATE}}
        }
    }

    sum = total(ty, tx, sum);
#if TIES
    ties = total(ty, tx, ties);
#end
    for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
        if (is_row(first, row + r) && any_visible[r]) {
            if (tx == 0u) {
                let at = state + statistics_at(first, head, row + r);
                statistics[at] = row_max[r];
                statistics[at + 1u] = sum[r];
#if TIES
                statistics[at + 2u] = ties[r];
#end
                statistics[at + 3u] = 1.0;
            }
        }
    }
{{STORE_ACC}}
}
