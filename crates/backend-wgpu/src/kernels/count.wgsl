// Counts a batch of kernels, as its last one.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> counter: array<u32>;

@compute @workgroup_size(1)
fn main() {
    counter[0] = counter[0] + params.step;
}
