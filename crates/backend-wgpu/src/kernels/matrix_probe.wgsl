// Products of two 32 × 32 matrices, computed as in the tile kernels: left_half·right_halfᵀ. Every
// workgroup computes them in several rounds. In each the matrices have other factors, so that an
// element that an invocation reads too early, from the round before, makes the product wrong.
//
// result: the product of the first workgroup's first round; then, for each invocation of all
// workgroups, how many elements were wrong, and one more if its subgroup has other invocations than
// those that follow the subgroups before.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> result: array<f32>;

{{DECLARATIONS}}

fn left_element(at: u32) -> u32 {
    return (at * params.left_step) % 17u;
}

fn right_element(at: u32) -> u32 {
    return (at * params.right_step) % 13u;
}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
{{COUNT_MATRICES}}
    // elements lane, lane + 64, … of the product, of integers
    var wanted: array<u32, 16>;
    for (var n = 0u; n < 16u; n++) {
        let at = lane + 64u * n;
        var sum = 0u;
        for (var k = 0u; k < 32u; k++) {
            sum += left_element(32u * (at / 32u) + k) * right_element(32u * (at % 32u) + k);
        }
        wanted[n] = sum;
    }
    var wrong = select(1u, 0u, subgroup == lane / (64u / subgroups));
    for (var round = 0u; round < params.rounds; round++) {
        // factors of at most 3, so that f16 represents the elements and f32 the sums exactly
        let left_factor = 1u + round % 3u;
        let right_factor = 1u + round % 2u;
        for (var n = lane; n < 256u; n = n + 64u) {
            let at = {{HALF_STEP}}u * (n / 8u) + n % 8u;
            for (var e = 0u; e < 4u; e++) {
                left_half[at][e] = f16(left_factor * left_element(4u * n + e));
                right_half[at][e] = f16(right_factor * right_element(4u * n + e));
            }
        }
        workgroupBarrier();
        {
{{PRODUCT}}
        }
        workgroupBarrier();
        for (var n = 0u; n < 16u; n++) {
            let at = lane + 64u * n;
            let row = {{PRODUCT_STEP}}u * (at / 32u);
            let product = products[row + (at % 32u) / 4u][at % 4u];
            if (product != f32(left_factor * right_factor * wanted[n])) {
                wrong++;
            }
            if (round == 0u && workgroup.x == 0u) {
                result[at] = product;
            }
        }
    }
    result[1024u + 64u * workgroup.x + lane] = f32(wrong);
}
