// Subgroup size and shuffles of each invocation, as `forward.wgsl` uses them.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) size: u32,
) {
    let own = params.step * lane;
    result[4u * lane] = size;
    result[4u * lane + 1u] = subgroupShuffleXor(own, 1u);
    result[4u * lane + 2u] = subgroupShuffleXor(own, 2u);
    result[4u * lane + 3u] = subgroupShuffleXor(own, 4u);
}
