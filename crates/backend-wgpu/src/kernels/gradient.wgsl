// Backward step of four scores: from s and dp to ds and the factor of dout in dV.
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

#if MATRIX
// (shift, max, Δ, share) of unnormalized outputs, with which their gradients are those of
// normalized ones, but for the share of the largest scores (`matrix_epilogue.rs`).
fn shifted_statistics(row: vec4<f32>) -> vec4<f32> {
    let shift = select(row.y, row.x, is_negative_infinity(row.x));
    let factor = {{EXPONENTIALS}}(vec4<f32>(row.y - row.x)).x;
    return vec4<f32>(shift, row.y, row.z * factor, row.w);
}

// Returns the addend a of e^(s − shift) = 2^(s·log2 e + a). For a query that attends to nothing it
// is so small that all p are 0.
fn exponent_of(shift: f32) -> f32 {
    return select(shift * -LOG2_E, -3.4028234e38, is_negative_infinity(shift));
}
#end

struct ScoreGradients {
    ds: vec4<f32>,
    p_dropped: vec4<f32>,
}

#if GENERAL
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, keep: vec4<f32>, lse: vec4<f32>, row_max: vec4<f32>, delta: vec4<f32>, share: vec4<f32>) -> ScoreGradients {
    let p = {{EXPONENTIALS}}(s - lse);
    if ({{IS_UNNORMALIZED}}) {
        let e = {{EXPONENTIALS}}(s - row_max);
        let lost = select(vec4<f32>(0.0), share, s == row_max);
        return ScoreGradients(fma(e, keep * dp, -(p * delta)) - lost, keep * e);
    }
    return ScoreGradients(p * fma(keep, dp, -delta), keep * p);
}
#else
#if DROPOUT
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, keep: vec4<f32>, lse: vec4<f32>, delta: vec4<f32>) -> ScoreGradients {
    let p = {{EXPONENTIALS}}(s - lse);
    return ScoreGradients(p * fma(keep, dp, -delta), keep * p);
}
#else
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, lse: vec4<f32>, delta: vec4<f32>) -> ScoreGradients {
    let p = {{EXPONENTIALS}}(s - lse);
    return ScoreGradients(p * (dp - delta), p);
}
#end
#end
