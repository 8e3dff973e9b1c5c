//! Times one forward and one backward pass of the backend, with any bias and thread count: one JSON
//! line.
//!
//! ```sh
//! cargo run --release -p annulus-bench --features cpu --bin cpu-backward -- threads=2 heads=1 \
//!     n=2048 mask=causal bias=1111
//! ```
//! `bias` lists batch rows, heads, queries and keys: `x` if the bias has the axis, `1` if it is
//! broadcast along it. `benches/pairs.py` alternates two builds of this program. Times are the
//! minimum over all rounds, in milliseconds; CPU times are summed over threads.

use std::{ops::ControlFlow, sync::Arc, time::Instant};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, DType, Dims, Element, Error,
    ForwardPass, Gradients, Host, HostBuffer, HostView, HostViewMut, Inputs, Outputs, Passes,
    Precision, RankShard, Result, RowSet, Rows, Spec, Workspace, mask,
};
use annulus_cpu::Cpu;
use half::bf16;
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let find = |name: &str| {
        arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name: &'static str, otherwise: usize| match find(name) {
        Some(text) => text.parse().map_err(|_| Error::invalid(name, text, "a number")),
        None => Ok(otherwise),
    };
    let heads = number("heads", 8)?;
    let n = number("n", 2048)?;
    let dims = Dims {
        q_heads: heads,
        ..Dims::new(number("batch", 1)?, n, number("kv-heads", heads)?, number("d", 64)?)
    };
    let dtype = find("dtype").unwrap_or("f32");
    let mut spec = Spec::new(dims, if dtype == "f32" { DType::F32 } else { DType::Bf16 });
    match find("mask").unwrap_or("full") {
        "full" => {}
        "causal" => spec.mask = Arc::new(mask::Causal::default()),
        "window" => spec.mask = Arc::new(mask::Window::new(Some(255), Some(0))),
        other => return Err(Error::invalid("mask", other, "full, causal or window")),
    }
    if let Some(axes) = find("bias") {
        let axes: Vec<_> = axes
            .bytes()
            .zip([dims.batch, heads, n, n])
            .map(|(axis, len)| if axis == b'x' { len } else { 1 })
            .collect();
        spec.bias = Some(axes.try_into().map_err(|axes| {
            Error::invalid("bias", format!("{axes:?}"), "four axes, each x or 1")
        })?);
    }
    let threads = number("threads", 1)?;
    let rounds = number("rounds", 5)?;
    match dtype {
        "f32" => time::<f32>(&spec, threads, rounds),
        "bf16" => time::<bf16>(&spec, threads, rounds),
        "bf16-rounded" => {
            time::<bf16>(&Spec { precision: Precision::Default, ..spec }, threads, rounds)
        }
        other => Err(Error::invalid("dtype", other, "f32, bf16 or bf16-rounded")),
    }
}

/// Returns the CPU time of all threads and the elapsed time, in milliseconds.
fn now(start: Instant) -> [f64; 2] {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    [cpu.tv_sec as f64 * 1e3 + cpu.tv_nsec as f64 * 1e-6, start.elapsed().as_secs_f64() * 1e3]
}

fn time<E: Element<Accumulator = f32>>(spec: &Spec, threads: usize, rounds: usize) -> Result<()> {
    let Dims { batch, q_len, q_heads, kv_heads, head_dim, .. } = spec.dims;
    let tensor = |heads: usize| {
        let element =
            |(b, i, h, c)| E::from_f64(((b + i * 7 + h * 3 + c * 5) % 11) as f64 / 11.0 - 0.5);
        Array4::from_shape_fn((batch, q_len, heads, head_dim), element)
    };
    let q = tensor(q_heads);
    let k = tensor(kv_heads);
    let v = tensor(kv_heads);
    let bias = spec.bias.map(|shape| Array4::from_elem(shape, 0.25));
    let rows = Arc::new(Rows::counting(q_len as u64, 0)?);
    let queries = rows.clone();
    let keys = rows.clone();
    let most = q_len as u64;
    let shard = RankShard {
        spec: Arc::new(spec.clone()),
        queries,
        keys,
        attention_mask: None,
        most_block_rows: most,
        most_query_rows: most,
        leaves: None,
    };
    let cpu = Cpu::new(threads)?;
    let mut workspace = cpu.workspace(&shard, Passes::Both)?;
    let mut buffer = HostBuffer::zeroed(spec.kv_row_layout().bytes() * most)?;
    let mut sums = HostBuffer::zeroed(spec.gradient_row_layout().bytes() * most)?;
    let views = [&q, &k, &v].map(|array| E::view(array.view()));
    let inputs = Inputs {
        q: views[0],
        k: views[1],
        v: views[2],
        bias: bias.as_ref().map(|b| HostView::F32(b.view())),
        sinks: None,
    };
    let mut out = q.clone();
    let statistic = || Array4::zeros((batch, q_heads, q_len, 1));
    let (mut lse, mut max, mut sum) = (statistic(), statistic(), statistic());
    let mut dq = q.clone();
    let mut dk = k.clone();
    let mut dv = v.clone();
    let mut dbias = bias.clone();
    let mut tick = || ControlFlow::Continue(());
    let mut least = [[f64::INFINITY; 2]; 2];
    for _ in 0..rounds.max(1) {
        let start = Instant::now();
        let begun = now(start);
        let mut pass = workspace.forward(inputs.as_ref().map(HostView::reborrow), &mut tick)?;
        pass.local_kv(&mut buffer, &RowSet::new())?;
        pass.attend(
            &Block { buffer: &buffer, ready: &(), rows: &rows, first_local: Some(0) },
            &mut tick,
        )?;
        let outputs = &mut Outputs {
            out: E::view_mut(out.view_mut()),
            lse: HostViewMut::F32(lse.view_mut()),
            max: Some(HostViewMut::F32(max.view_mut())),
            sum: Some(HostViewMut::F32(sum.view_mut())),
            ties: None,
            out_residual: None,
        };
        pass.finish(outputs, &mut tick)?;
        let between = now(start);
        let inputs = BackwardInputs {
            forward: inputs.as_ref().map(HostView::reborrow),
            out: E::view(out.view()),
            max: HostView::F32(max.view()),
            sum: Some(HostView::F32(sum.view())),
            ties: None,
            dout: E::view(q.view()),
            dlse: None,
            out_residual: None,
        };
        let mut pass = workspace.backward(inputs, BackwardMode::OnePass, &mut tick)?;
        pass.local_kv(&mut buffer, &RowSet::new())?;
        let block = Block { buffer: &buffer, ready: &(), rows: &rows, first_local: Some(0) };
        pass.attend_kv(&block, Some(&mut sums), &mut tick)?;
        let mut gradients = Gradients {
            dq: E::view_mut(dq.view_mut()),
            dk: E::view_mut(dk.view_mut()),
            dv: E::view_mut(dv.view_mut()),
            dbias: dbias.as_mut().map(|dbias| HostViewMut::F32(dbias.view_mut())),
            dsinks: None,
        };
        pass.finish(&sums, &mut gradients, &mut tick)?;
        let ended = now(start);
        for clock in 0..2 {
            least[0][clock] = least[0][clock].min(between[clock] - begun[clock]);
            least[1][clock] = least[1][clock].min(ended[clock] - between[clock]);
        }
    }
    let [[forward_cpu, forward], [backward_cpu, backward]] = least;
    println!(
        "{{\"forward_cpu_ms\":{forward_cpu:.3},\"forward_ms\":{forward:.3},\
         \"backward_cpu_ms\":{backward_cpu:.3},\"backward_ms\":{backward:.3}}}"
    );
    Ok(())
}
