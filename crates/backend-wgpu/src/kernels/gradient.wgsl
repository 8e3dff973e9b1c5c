// Backward step of four scores: from s and dp to ds and the factor of dout in dV.
//
//   e = e^{s − max};  p = e·(1 / sum)
//   normalized:     ds = p·(keep·dp − Δ);  p_dropped = keep·p
//   unnormalized:   ds = e·keep·dp − p·Δ − [s = max]·share;  p_dropped = keep·e
//
// A row's statistics are (max, 1 / sum, Δ, share); a row with max = +∞ attends to nothing. The
// maximum is subtracted first: any product with a score may overflow or round it.

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

#if GENERAL
fn is_not_positive_infinity(x: vec4<f32>) -> vec4<bool> {
    return bitcast<vec4<u32>>(x) != vec4<u32>(POSITIVE_INFINITY);
}
#end

#if MATRIX
fn is_positive_infinity(x: f32) -> bool {
    return bitcast<u32>(x) == POSITIVE_INFINITY;
}

// (max, factor, Δ / sum, share), where factor is 1 / sum, or 1 of unnormalized outputs. With these
// the gradients of both kinds of outputs have the same formula, but for the share of the largest
// scores (`matrix_epilogue.rs`).
fn scaled_statistics(row: vec4<f32>) -> vec4<f32> {
    let factor = select(row.y, 1.0, {{IS_UNNORMALIZED}});
    return vec4<f32>(row.x, factor, row.z * row.y, row.w);
}
#end

struct ScoreGradients {
    ds: vec4<f32>,
    p_dropped: vec4<f32>,
}

#if GENERAL
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, keep: vec4<f32>, row_max: vec4<f32>, inverse_sum: vec4<f32>, delta: vec4<f32>, share: vec4<f32>) -> ScoreGradients {
    let e = {{EXPONENTIALS}}(s - row_max);
    let p = e * inverse_sum;
    if ({{IS_UNNORMALIZED}}) {
        let lost = select(vec4<f32>(0.0), share, s == row_max);
        return ScoreGradients(fma(e, keep * dp, -(p * delta)) - lost, keep * e);
    }
    return ScoreGradients(p * fma(keep, dp, -delta), keep * p);
}
#else
#if DROPOUT
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, keep: vec4<f32>, row_max: vec4<f32>, inverse_sum: vec4<f32>, delta: vec4<f32>) -> ScoreGradients {
    let p = {{EXPONENTIALS}}(s - row_max) * inverse_sum;
    return ScoreGradients(p * fma(keep, dp, -delta), keep * p);
}
#else
fn score_gradients(s: vec4<f32>, dp: vec4<f32>, row_max: vec4<f32>, inverse_sum: vec4<f32>, delta: vec4<f32>) -> ScoreGradients {
    let p = {{EXPONENTIALS}}(s - row_max) * inverse_sum;
    return ScoreGradients(p * (dp - delta), p);
}
#end
#end
