//! Times packed documents against the same documents one by one, on one rank: one JSON line.
//!
//! ```sh
//! cargo run --release -p annulus-bench --features cpu --bin cpu-documents -- \
//!     documents=512,2048,1000 heads=2 threads=1 rounds=5
//! ```
//! Both compute the same causal attention, forward and backward, from the same tensors into the
//! same tensors. One by one, each document is a forward and a backward pass over its rows, with a
//! workspace of its own, made beforehand. The two alternate. Times are the median over all rounds,
//! in milliseconds of CPU time, summed over threads; `ratio` is the median of one by one ÷ packed,
//! which is the rate of packed passes relative to that of documents alone.

use std::{ops::ControlFlow, sync::Arc};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, DType, Dims, Element, Error,
    ForwardPass, Gradients, Host, HostBuffer, Inputs, Outputs, Passes, RankShard, Result, RowSet,
    Rows, Spec, Workspace, mask,
};
use annulus_cpu::Cpu;
use ndarray::{Array4, Axis, Slice};
use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers = |name: &'static str, otherwise: &str| {
        let find = |argument: &String| Some(argument.strip_prefix(name)?.strip_prefix('=')?.into());
        let text: String = arguments.iter().find_map(find).unwrap_or_else(|| otherwise.into());
        let parsed: std::result::Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
        parsed
            .ok()
            .filter(|numbers| numbers.iter().all(|&number| number > 0))
            .ok_or_else(|| Error::invalid(name, &text, "positive numbers"))
    };
    let lens = numbers("documents", "512,512,512,512")?;
    let [heads, dim] = [numbers("heads", "2")?[0], numbers("d", "64")?[0]];
    let threads = numbers("threads", "1")?[0];
    let rounds = numbers("rounds", "5")?[0];
    let cpu = Cpu::new(threads)?;
    let mut tensors = Tensors::new(lens.iter().sum(), heads, dim);
    let mut packed = Part::new(&cpu, 0, &lens, heads, dim)?;
    let mut first = 0;
    let mut alone = Vec::new();
    for &len in &lens {
        alone.push(Part::new(&cpu, first, &[len], heads, dim)?);
        first += len;
    }
    let mut times = [vec![], vec![], vec![]];
    for round in 0..=rounds {
        let start = now();
        packed.run(&mut tensors)?;
        let between = now();
        for part in &mut alone {
            part.run(&mut tensors)?;
        }
        let [of_packed, of_alone] = [between - start, now() - between];
        // the first round touches all memory for the first time
        if round > 0 {
            times[0].push(of_packed);
            times[1].push(of_alone);
            times[2].push(of_alone / of_packed);
        }
    }
    let [of_packed, of_alone, ratio] = times.map(median);
    println!(
        "{{\"documents\":{},\"rows\":{first},\"packed_cpu_ms\":{of_packed:.3},\
         \"one_by_one_cpu_ms\":{of_alone:.3},\"ratio\":{ratio:.4}}}",
        lens.len()
    );
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the CPU time of all threads, in milliseconds.
fn now() -> f64 {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    cpu.tv_sec as f64 * 1e3 + cpu.tv_nsec as f64 * 1e-6
}

/// Tensors of all documents.
struct Tensors {
    inputs: [Array4<f32>; 4],
    out: Array4<f32>,
    lse: Array4<f32>,
    gradients: [Array4<f32>; 3],
}

impl Tensors {
    fn new(rows: usize, heads: usize, dim: usize) -> Self {
        let shape = (1, rows, heads, dim);
        let tensor = |seed: usize| {
            Array4::from_shape_fn(shape, |(_, i, h, c)| {
                let hash = (i * 7 + h * 131 + c * 29 + seed * 1009).wrapping_mul(0x9e37_79b9);
                (hash >> 8 & 0xffff) as f32 / 16_384.0 - 2.0
            })
        };
        Self {
            inputs: [0, 1, 2, 3].map(tensor),
            out: Array4::zeros(shape),
            lse: Array4::zeros((1, heads, rows, 1)),
            gradients: std::array::from_fn(|_| Array4::zeros(shape)),
        }
    }
}

/// Passes over adjacent documents.
struct Part {
    /// Rows of the tensors.
    slice: Slice,
    rows: Arc<Rows>,
    workspace: annulus_cpu::Workspace,
    /// Keys and values are read in place.
    records: HostBuffer,
    gradient_records: HostBuffer,
}

impl Part {
    fn new(cpu: &Cpu, first: usize, lens: &[usize], heads: usize, dim: usize) -> Result<Self> {
        let len: usize = lens.iter().sum();
        let mut spec = Spec::new(Dims::new(1, len, heads, dim), DType::F32);
        spec.mask = Arc::new(mask::Causal::default());
        let mut rows = Rows::counting(len as u64, 0)?;
        if let [_, _, ..] = lens {
            rows.refill(|numbers, positions, segments| {
                for (document, &len) in (0..).zip(lens) {
                    segments.extend(std::iter::repeat_n(document, len));
                }
                numbers.extend(0..len as u64);
                positions.extend(0..len as i64);
            })?;
        }
        let rows = Arc::new(rows);
        let most = len as u64;
        let shard = RankShard {
            spec: Arc::new(spec),
            queries: Arc::clone(&rows),
            keys: Arc::clone(&rows),
            attention_mask: None,
            most_block_rows: most,
            most_query_rows: most,
            leaves: None,
        };
        Ok(Self {
            slice: Slice::from(first..first + len),
            rows,
            workspace: cpu.workspace(&shard, Passes::Both)?,
            records: HostBuffer::zeroed(0)?,
            gradient_records: HostBuffer::zeroed(shard.spec.gradient_row_layout().bytes() * most)?,
        })
    }

    /// Runs a forward and a backward pass.
    fn run(&mut self, tensors: &mut Tensors) -> Result<()> {
        let Self { slice, rows, workspace, records, gradient_records } = self;
        let [q, k, v, dout] =
            tensors.inputs.each_ref().map(|t| f32::view(t.slice_axis(Axis(1), *slice)));
        let inputs = Inputs::<Host> { q, k, v, bias: None, sinks: None };
        let mut tick = || ControlFlow::Continue(());
        let mut outputs = Outputs {
            out: f32::view_mut(tensors.out.slice_axis_mut(Axis(1), *slice)),
            lse: f32::view_mut(tensors.lse.slice_axis_mut(Axis(2), *slice)),
            max: None,
            sum: None,
            ties: None,
            out_residual: None,
        };
        let mut pass = workspace.forward(inputs.reborrow(), &mut tick)?;
        pass.local_kv(records, &RowSet::new())?;
        pass.attend_last(
            &Block { buffer: records, ready: &(), rows, first_local: Some(0) },
            &mut outputs,
            &mut tick,
        )?;
        pass.finish(&mut outputs, &mut tick)?;
        let inputs = BackwardInputs {
            forward: inputs,
            out: f32::view(tensors.out.slice_axis(Axis(1), *slice)),
            max: f32::view(tensors.lse.slice_axis(Axis(2), *slice)),
            sum: None,
            ties: None,
            dout,
            dlse: None,
            out_residual: None,
        };
        let mut pass = workspace.backward(inputs, BackwardMode::OnePass, &mut tick)?;
        pass.local_kv(records, &RowSet::new())?;
        let block = Block { buffer: records, ready: &(), rows, first_local: Some(0) };
        pass.attend_kv(&block, Some(gradient_records), &mut tick)?;
        let [dq, dk, dv] = tensors
            .gradients
            .each_mut()
            .map(|gradient| f32::view_mut(gradient.slice_axis_mut(Axis(1), *slice)));
        let mut gradients = Gradients { dq, dk, dv, dbias: None, dsinks: None };
        pass.finish(gradient_records, &mut gradients, &mut tick)
    }
}
