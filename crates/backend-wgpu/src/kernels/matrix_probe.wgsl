// Product of two 32 × 32 matrices, computed as in the tile kernels: left_half·right_halfᵀ. Wrong
// also if a subgroup has other invocations than those that follow the subgroups before.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> result: array<f32>;

{{DECLARATIONS}}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
{{COUNT_MATRICES}}
    for (var n = lane; n < 256u; n = n + 64u) {
        let at = {{HALF_STEP}}u * (n / 8u) + n % 8u;
        let element = vec4<u32>(4u * n) + vec4<u32>(0u, 1u, 2u, 3u);
        left_half[at] = vec4<f16>((element * params.left_step) % vec4<u32>(17u));
        right_half[at] = vec4<f16>((element * params.right_step) % vec4<u32>(13u));
    }
    workgroupBarrier();
    {
{{PRODUCT}}
    }
    workgroupBarrier();
    let is_in_order = subgroup == lane / (64u / subgroups);
    for (var n = lane; n < 1024u; n = n + 64u) {
        let product = products[{{PRODUCT_STEP}}u * (n / 32u) + (n % 32u) / 4u][n % 4u];
        result[n] = select(-1.0, product, is_in_order);
    }
}
