// Bits of f16 numbers that are widened by the device's own conversion.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    result[lane] = bitcast<u32>(unpack2x16float(params.step * lane).x);
}
