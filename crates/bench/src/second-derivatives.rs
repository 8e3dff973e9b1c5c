//! Times a JVP against the forward pass, and a double backward against the backward pass, on one
//! thread of one rank.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin second-derivatives
//! cargo run --release -p annulus-bench --features plan --bin second-derivatives -- \\
//!     len=16384 heads=1 times=1 passes=backward
//! ```
//!
//! Prints one JSON line: the CPU seconds of each pass (best of `times`, the passes in turn), their
//! ratios, the bytes that the plan keeps, and the peak memory of the process. The peak of one pass
//! is that of a process with `passes=` this one alone.

use std::fs;

use annulus::{Attention, DType, Dims, Element, LocalRing, Result, Runtime, Tensors, half};
use annulus_bench::{Parameters, cpu_seconds, draw};
use ndarray::Array4;

const NAMES: [&str; 9] =
    ["len", "heads", "kv_heads", "dim", "causal", "dtype", "times", "passes", "ranks"];

const PASSES: [&str; 4] = ["forward", "backward", "jvp", "double_backward"];

fn main() -> Result<()> {
    let parameters = Parameters::parse(std::env::args().skip(1), &NAMES)?;
    match parameters.get("dtype").unwrap_or("f32") {
        "f64" => run::<f64>(&parameters),
        "bf16" => run::<half::bf16>(&parameters),
        "f16" => run::<half::f16>(&parameters),
        _ => run::<f32>(&parameters),
    }
}

fn run<T: Element>(parameters: &Parameters) -> Result<()> {
    let len = parameters.count("len", 1024)?;
    let heads = parameters.count("heads", 4)?;
    let kv_heads = parameters.count("kv_heads", heads)?;
    let dim = parameters.count("dim", 64)?;
    let ranks = parameters.count("ranks", 1)?;
    let times = parameters.count("times", 5)?;
    let causal = parameters.get("causal") == Some("true");
    let passes = parameters.named("passes", &PASSES.join(","), PASSES, |name| name)?;
    let dtype: DType = T::DTYPE;
    let dims = Dims { kv_heads, ..Dims::new(1, len, heads, dim) };
    let tensors = || draw(dims, dtype).map(|tensor| tensor.mapv(T::from_f64));
    let [q, k, v, dout]: [Array4<T>; 4] = tensors();
    let [q_tangent, k_tangent, v_tangent, _]: [Array4<T>; 4] =
        tensors().map(|tensor| tensor.mapv(|x| T::from_f64(0.5 * x.to_f64())));
    let primal = Tensors::new(q.view(), k.view(), v.view());
    let tangent = Tensors::new(q_tangent.view(), k_tangent.view(), v_tangent.view());
    let needs = |name| passes.contains(&name);
    let attention = Attention::new()
        .dtype(dtype)
        .causal(causal)
        .forward_only(!needs("backward") && !needs("double_backward"))
        .second_derivatives(needs("jvp") || needs("double_backward"));
    let runtime = Runtime::new().threads(1);
    let mut ring = LocalRing::new((attention, annulus::Division::new(), runtime), dims, ranks)?;
    let forward = needs("backward").then(|| ring.forward(&primal)).transpose()?;
    let mut best = [f64::INFINITY; 4];
    for _ in 0..times {
        for (best, name) in best.iter_mut().zip(PASSES).filter(|(_, name)| needs(name)) {
            let begin = cpu_seconds();
            match (name, &forward) {
                ("forward", _) => drop(ring.forward(&primal)?),
                ("backward", Some(forward)) => {
                    drop(ring.backward(&primal, forward, dout.view(), None)?);
                }
                ("jvp", _) => drop(ring.jvp(&primal, &tangent, None)?),
                _ => drop(ring.double_backward(&primal, dout.view(), None, &tangent, None)?),
            }
            *best = best.min(cpu_seconds() - begin);
        }
    }
    // null for passes that were not asked for
    let json = |number: f64, digits: usize| match number.is_finite() {
        true => format!("{number:.digits$}"),
        false => "null".to_owned(),
    };
    let [forward_s, backward_s, jvp_s, double_s] = best.map(|seconds| json(seconds, 4));
    let [forward, backward, jvp, double] = best;
    let ratio = |time: f64, first_order: f64| match first_order.is_finite() {
        true => time / first_order,
        false => f64::INFINITY,
    };
    let kept = ring.plan().workspace_bytes() + ring.plan().buffer_bytes();
    println!(
        "{{\"len\":{len},\"heads\":{heads},\"kv_heads\":{kv_heads},\"dim\":{dim},\"dtype\":\"{dtype}\",\
         \"causal\":{causal},\"ranks\":{ranks},\"passes\":\"{}\",\"forward_s\":{forward_s},\
         \"backward_s\":{backward_s},\"jvp_s\":{jvp_s},\"double_backward_s\":{double_s},\
         \"jvp_ratio\":{},\"double_backward_ratio\":{},\"kept_bytes\":{kept},\
         \"peak_kib\":{}}}",
        passes.join("+"),
        json(ratio(jvp, forward), 3),
        json(ratio(double, backward), 3),
        peak_kib()
    );
    Ok(())
}

/// Returns the peak of the memory of this process in KiB; 0 where the system does not tell it.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}
