// Backward step of one score: from s and dp to ds and the factor of dout in dV.
//
//   normalized:     p = e^{s − lse};  ds = p·(keep·dp − Δ);  p_dropped = keep·p
//   unnormalized:   p = e^{s − lse};  e = e^{s − max};  ds = e·keep·dp − p·Δ − [s = max]·share;
//                   p_dropped = keep·e
//
// A row's statistics are (lse, max, Δ, share); a row with lse = −∞ attends to nothing.

fn statistics_of(at: u32) -> vec4<f32> {
#if HALF_STATISTICS
    var all = vec4<f32>(0.0);
    for (var n = 0u; n < 4u; n++) {
        let half_at = at + 2u * n;
        let low = (statistics[half_at >> 1u] >> (16u * (half_at & 1u))) & 0xffffu;
        let high = (statistics[(half_at + 1u) >> 1u] >> (16u * ((half_at + 1u) & 1u))) & 0xffffu;
        all[n] = bitcast<f32>(low | (high << 16u));
    }
    return all;
#else
    return vec4<f32>(bitcast<f32>(statistics[at]), bitcast<f32>(statistics[at + 1u]),
        bitcast<f32>(statistics[at + 2u]), bitcast<f32>(statistics[at + 3u]));
#end
}

struct ScoreGradient {
    ds: f32,
    p_dropped: f32,
}

fn score_gradient(s: f32, dp: f32, keep: f32, row: vec4<f32>) -> ScoreGradient {
    let p = exponential(s - row.x);
#if GENERAL
    if (params.normalize == 0u) {
        let e = exponential(s - row.y);
        let lost = select(0.0, row.w, s == row.y);
        return ScoreGradient(fma(e, keep * dp, -(p * row.z)) - lost, keep * e);
    }
#end
    return ScoreGradient(p * fma(keep, dp, -row.z), keep * p);
}
