// Kernels of one number, `step`. Each expansion has one of them.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

#if COUNT
// Counts a batch of kernels, as its last one.
@compute @workgroup_size(1)
fn main() {
    result[0] = result[0] + params.step;
}
#end
#if UNPACK_PROBE
// Bits of f16 numbers that are widened by the device's own conversion.
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    result[lane] = bitcast<u32>(unpack2x16float(params.step * lane).x);
}
#end
#if SUBGROUP_PROBE
// Subgroup size and shuffles of each invocation, as `forward.wgsl` uses them.
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
#end
