// Product of two 32 × 32 matrices, computed as in the tile kernels: left_half·right_halfᵀ.

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
    for (var n = lane; n < 1024u; n = n + 64u) {
        let at = {{HALF_STEP}}u * (n / 32u) + n % 32u;
        left_half[at] = f16((n * params.left_step) % 17u);
        right_half[at] = f16((n * params.right_step) % 13u);
    }
    workgroupBarrier();
    {
{{PRODUCT}}
    }
    workgroupBarrier();
    for (var n = lane; n < 1024u; n = n + 64u) {
        result[n] = products[{{PRODUCT_STEP}}u * (n / 32u) + n % 32u];
    }
}
