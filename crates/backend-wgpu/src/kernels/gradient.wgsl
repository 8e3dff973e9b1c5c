// The gradient of one logit, for the kernels of the backward pass.
//
//   normalised:     p = e^{s − lse}                      ds = p·(keep·dp − delta)                                  weight = keep·p
//   unnormalised:   p = e^{s − lse}   e = e^{s − max}    ds = e·keep·dp − p·delta − [s = max]·share                weight = keep·e
//
// A row's statistics are (lse, max, delta, share); a row whose lse is −∞ sees nothing.

fn statistics_of(at: u32) -> vec4<f32> {
#if HALF_STATISTICS
    var all = vec4<f32>(0.0);
    for (var n = 0u; n < 4u; n++) {
        let place = at + 2u * n;
        let low = (statistics[place >> 1u] >> (16u * (place & 1u))) & 0xffffu;
        let high = (statistics[(place + 1u) >> 1u] >> (16u * ((place + 1u) & 1u))) & 0xffffu;
        all[n] = bitcast<f32>(low | (high << 16u));
    }
    return all;
#else
    return vec4<f32>(bitcast<f32>(statistics[at]), bitcast<f32>(statistics[at + 1u]),
        bitcast<f32>(statistics[at + 2u]), bitcast<f32>(statistics[at + 3u]));
#end
}

struct Slope {
    ds: f32,
    weight: f32,
}

fn slope_of(logit: f32, product: f32, keep: f32, row: vec4<f32>) -> Slope {
    let p = exponential(logit - row.x);
#if GENERAL
    if (numbers.normalize == 0u) {
        let e = exponential(logit - row.y);
        let lost = select(0.0, row.w, logit == row.y);
        return Slope(fma(e, keep * product, -(p * row.z)) - lost, keep * e);
    }
#end
    return Slope(p * fma(keep, product, -row.z), keep * p);
}
