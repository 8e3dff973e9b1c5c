//! Speed of the CUDA backend on one GPU, forward and backward, at its level. Prints JSON lines.
//!
//! ```text
//! cuda-levels [device=0] [batch=4] [heads=16] [dims=64,128] [lens=8192,16384]
//!             [dtypes=bf16,f16,f32] [seconds=1]
//! ```
//! Tensors stay on the device. A pass is one call of a ring of one rank; the host clock runs around
//! as many passes as fill the time, with the device idle before and after. FLOPs are useful ones:
//! forward 4·batch·heads·len²·dim, half of it for a causal mask; backward 2.5 times as many.
//! `scripts/gpu-check` runs it beside peers. `device=emulated` checks on any machine that it runs;
//! its times mean nothing.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use annulus::{Attention, DType, Dims, Error, Result, Ring};
use annulus_comm::{Staged, threads};
use annulus_core::{BackwardInputs, Element, Gradients, Inputs, Outputs};
use annulus_cuda::{
    Cuda,
    device::{CudaCopier, CudaSpace, CudaTensor, Stream},
};

/// Parameters of a measurement.
struct Settings {
    device: String,
    batch: usize,
    heads: usize,
    dims: Vec<usize>,
    lens: Vec<usize>,
    dtypes: Vec<DType>,
    seconds: f64,
}

impl Settings {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self> {
        let mut all = Self {
            device: "0".into(),
            batch: 4,
            heads: 16,
            dims: vec![64, 128],
            lens: vec![8192, 16384],
            dtypes: vec![DType::Bf16, DType::F16, DType::F32],
            seconds: 1.0,
        };
        for word in words {
            let want =
                "device=, batch=, heads=, dims=, lens=, dtypes= or seconds=, and what it takes";
            let wrong = || Error::invalid("argument", &word, want);
            let (name, value) = word.split_once('=').ok_or_else(wrong)?;
            let numbers = || {
                value
                    .split(',')
                    .map(|number| number.parse().map_err(|_| wrong()))
                    .collect::<Result<Vec<usize>>>()
            };
            let number = || value.parse::<usize>().map_err(|_| wrong());
            let dtype = |name: &str| {
                let all = [DType::F64, DType::F32, DType::Bf16, DType::F16];
                all.into_iter().find(|dtype| dtype.name() == name).ok_or_else(wrong)
            };
            match name {
                "device" => all.device = value.to_owned(),
                "batch" => all.batch = number()?,
                "heads" => all.heads = number()?,
                "dims" => all.dims = numbers()?,
                "lens" => all.lens = numbers()?,
                "dtypes" => all.dtypes = value.split(',').map(dtype).collect::<Result<_>>()?,
                "seconds" => all.seconds = value.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        Ok(all)
    }

    fn open(&self) -> Result<Cuda> {
        if self.device == "emulated" {
            use annulus_cuda_emulator as emulator;

            return Cuda::with_symbols(
                Ok(emulator::symbols()),
                || Ok(emulator::compiler_symbols()),
                0,
            );
        }
        Cuda::open(
            self.device
                .parse()
                .map_err(|_| Error::invalid("device", &self.device, "the number of a GPU"))?,
        )
    }
}

/// Longest wait for the device.
const DEADLINE: Duration = Duration::from_secs(120);

/// Creates a tensor of pseudo-random numbers in −1 … 1.
fn tensor(stream: &Stream, dtype: DType, shape: [usize; 4], salt: u64) -> Result<CudaTensor> {
    let count: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(count * dtype.bytes());
    let mut state = salt;
    for _ in 0..count {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 40) as f64 / f64::from(1 << 23) - 1.0;
        match dtype {
            DType::F64 => bytes.extend(number.to_le_bytes()),
            DType::F32 => bytes.extend((number as f32).to_le_bytes()),
            DType::Bf16 => bytes.extend(<half::bf16 as Element>::from_f64(number).to_le_bytes()),
            DType::F16 => bytes.extend(<half::f16 as Element>::from_f64(number).to_le_bytes()),
        }
    }
    CudaTensor::upload(stream, &bytes, dtype, shape)
}

/// Returns the mean time of `pass`, repeated for about `seconds`, after one warm-up pass.
fn time(stream: &Stream, seconds: f64, mut pass: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut passes = |count: u32| -> Result<f64> {
        let start = Instant::now();
        (0..count).try_for_each(|_| pass())?;
        stream.synchronize(DEADLINE)?;
        Ok(start.elapsed().as_secs_f64())
    };
    passes(1)?;
    let once = passes(1)?.max(1e-6);
    let count = (seconds / once).clamp(1.0, 1000.0) as u32;
    Ok(passes(count)? / f64::from(count))
}

/// Times forward and backward, and prints a line for each.
fn measure(
    cuda: &Cuda,
    settings: &Settings,
    dtype: DType,
    len: usize,
    dim: usize,
    causal: bool,
) -> Result<()> {
    let Settings { batch, heads, seconds, .. } = *settings;
    let stream = cuda.stream();
    let sums = dtype.accumulator();
    let attention = Attention::new().causal(causal).dtype(dtype);
    let transport =
        Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), CudaCopier::new(stream.device())?);
    let spec = attention.spec(Dims::new(batch, len, heads, dim));
    let mut ring = Ring::new(cuda.clone(), Box::new(transport), spec, attention.ring_options())?;
    let shape = [batch, len, heads, dim];
    let statistics = [batch, heads, len, 1];
    let [q, k, v, dout] = [1, 2, 3, 4].map(|salt| tensor(stream, dtype, shape, salt));
    let q = q?;
    let k = k?;
    let v = v?;
    let dout = dout?;
    let [mut out, mut dq, mut dk, mut dv] = {
        let made = || CudaTensor::uninitialized(stream, dtype, shape);
        [made()?, made()?, made()?, made()?]
    };
    let mut lse = CudaTensor::uninitialized(stream, sums, statistics)?;
    let inputs =
        Inputs::<CudaSpace> { q: q.view(), k: k.view(), v: v.view(), bias: None, sinks: None };
    let forward = time(stream, seconds, || {
        let mut outputs =
            Outputs { out: out.view_mut(), lse: lse.view_mut(), max: None, sum: None, ties: None };
        ring.forward(&inputs, &mut outputs).map(drop)
    })?;
    let inputs = BackwardInputs::<CudaSpace> {
        forward: inputs,
        out: out.view(),
        lse: lse.view(),
        max: None,
        ties: None,
        dout: dout.view(),
        dlse: None,
    };
    let backward = time(stream, seconds, || {
        let mut gradients = Gradients {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dbias: None,
            dsinks: None,
        };
        ring.backward(&inputs, &mut gradients).map(drop)
    })?;
    let level = cuda.level().name();
    let pairs = (batch * heads) as f64 * (len as f64).powi(2) * if causal { 0.5 } else { 1.0 };
    for (what, seconds, products) in [("fwd", forward, 2.0), ("bwd", backward, 5.0)] {
        let flops = products * 2.0 * pairs * dim as f64;
        println!(
            "{{\"peer\":\"annulus-cuda\",\"gpu\":\"{cuda}\",\"level\":\"{level}\",\"what\":\"{what}\",\
             \"dtype\":\"{}\",\"batch\":{batch},\"heads\":{heads},\"head_dim\":{dim},\
             \"n\":{len},\"causal\":{causal},\"ms\":{:.4},\"tflops\":{:.2}}}",
            dtype.name(),
            seconds * 1e3,
            flops / seconds / 1e12,
        );
    }
    Ok(())
}

fn run() -> Result<()> {
    let settings = Settings::parse(std::env::args().skip(1))?;
    let cuda = settings.open()?;
    for &dtype in &settings.dtypes {
        for (&len, &dim) in
            settings.lens.iter().flat_map(|len| settings.dims.iter().map(move |dim| (len, dim)))
        {
            for causal in [false, true] {
                measure(&cuda, &settings, dtype, len, dim, causal)?;
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda-levels: {error}");
            ExitCode::FAILURE
        }
    }
}
