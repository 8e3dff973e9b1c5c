//! One case of a bench: its tensors, its ring, its line.

use std::time::Duration;

use annulus::{Attention, Forward, Plan, Tensors};
use annulus_core::{Backend, Batch, DType, Dims, Element, HostTensors, Result, Runs, index};
use ndarray::Array4;
use serde_json::{Map, Value, json};

use super::{
    BenchFlags, What,
    clock::{Clock, Least, least},
};
use crate::{
    arguments::{
        mask::{AlignmentName, MaskFlags},
        names,
    },
    crew::{Crew, Endpoint},
    engine::{Engine, Wired, with_backend},
    failure::Outcome,
    memory, pairs,
    random::Stream,
    report::say,
};

/// One case.
#[derive(Debug)]
pub(super) struct Case<'a> {
    flags: &'a BenchFlags,
    dims: Dims,
    dtype: DType,
    causal: bool,
    batch: Batch,
}

/// One rank with its rows.
struct Rank<T: Element, B: Backend<Space: HostTensors>> {
    plan: Plan<B>,
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    dout: Array4<T>,
}

impl<'a> Case<'a> {
    /// A case of these lengths.
    pub(super) fn new(
        flags: &'a BenchFlags,
        dtype: DType,
        head_dim: usize,
        (q_len, kv_len): (usize, usize),
        causal: bool,
    ) -> Self {
        let dims = Dims {
            batch: flags.batch,
            q_len,
            kv_len,
            q_heads: flags.heads,
            kv_heads: flags.kv_heads.unwrap_or(flags.heads),
            head_dim,
            value_dim: head_dim,
        };
        let starts = std::iter::once(0).chain(flags.documents.iter().scan(0i64, |end, &len| {
            *end += len as i64;
            Some(*end)
        }));
        let cum_seqlens = (!flags.documents.is_empty()).then(|| starts.collect::<Vec<_>>());
        Self {
            flags,
            dims,
            dtype,
            causal,
            batch: Batch {
                cum_seqlens_q: cum_seqlens.clone(),
                cum_seqlens_k: cum_seqlens,
                ..Batch::default()
            },
        }
    }

    /// Times it on the ring of the crew and prints a line for each of `what`.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// Whatever a rank reports.
    pub(super) fn run<T: Element>(
        &self,
        crew: &mut Crew,
        what: &[What],
        engine: &Engine,
    ) -> Outcome {
        let clock = Clock::of(engine, crew)?;
        with_backend!(engine, self.flags.threads, make => self.run_on::<T, _>(crew, what, (engine.name(), &clock), make))
    }

    fn run_on<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        crew: &mut Crew,
        what: &[What],
        (name, clock): (&str, &Clock),
        make: impl Fn(Endpoint) -> Result<Wired<B>> + Sync,
    ) -> Outcome {
        let named = |error| {
            names::of_size(
                names::of_flags(error, &self.dims, self.flags.names()),
                &self.dims,
                self.flags.names(),
            )
        };
        let processes = if crew.is_of_processes() { crew.ranks() } else { 1 };
        // the first: what does not fit is not counted row by row
        crew.agree(self.attention().spec(self.dims).map(drop).map_err(named))?;
        let held = memory::Tensors::of(&self.dims, self.dtype, what.contains(&What::Both));
        crew.agree(held.shared_by(processes).must_fit().map_err(named))?;
        let pairs = crew.agree(self.pairs().map_err(named))?;
        for &what in what {
            let attention = if what == What::Forward {
                self.attention().forward_only(true)
            } else {
                self.attention()
            };
            let layout = self.flags.layout.layout();
            let endpoints = crew.endpoints()?;
            let mut ranks = crew.each(endpoints, |_, endpoint| {
                let (backend, transport) = make(endpoint)?;
                let mut plan = Plan::new(
                    &attention.clone().layout(layout.clone()),
                    self.dims,
                    backend,
                    transport,
                )?;
                if self.batch != Batch::default() {
                    plan.update(&self.batch)?;
                }
                Rank::<T, B>::new(plan, &self.dims)
            })?;
            let least = least(crew, |crew| match &mut ranks[..] {
                // nobody else to run beside
                [only] if crew.ranks() == 1 => Ok(vec![only.pass(what, clock)?]),
                ranks => crew.each(ranks, |_, rank| rank.pass(what, clock)),
            })?;
            let layout = ranks.first().map_or("", |rank| rank.plan.ring().layout().name());
            if crew.leads() {
                say!("{}", self.line(what, (least, name, clock), pairs, crew, layout));
            }
        }
        Ok(())
    }

    fn attention(&self) -> Attention {
        let flags = MaskFlags {
            causal: self.causal,
            window: self.flags.window,
            align: self.flags.align,
            ..MaskFlags::default()
        };
        flags.apply(Attention::new()).dtype(self.dtype).precision(self.flags.precision.into())
    }

    /// Visible pairs, all heads and batch rows; n²/2 for plain causal, as the peers count.
    fn pairs(&self) -> Result<f64> {
        let Dims { batch, q_len, kv_len, q_heads, .. } = self.dims;
        let plain = self.flags.window.is_none() && self.flags.documents.is_empty();
        if plain && (!self.causal || q_len == kv_len) {
            let share = if self.causal { 0.5 } else { 1.0 };
            return Ok(share * q_len as f64 * kv_len as f64 * q_heads as f64 * batch as f64);
        }
        Ok(pairs::visible(&self.attention().spec(self.dims)?, &self.batch))
    }

    fn line(
        &self,
        what: What,
        (least, backend, clock): (Least, &str, &Clock),
        pairs: f64,
        crew: &Crew,
        layout: &str,
    ) -> String {
        let (BenchFlags { threads, window, documents, .. }, ranks) = (self.flags, crew.ranks());
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        let (name, passes) = match what {
            What::Forward => ("fwd", 1.0),
            What::Both => ("fwd+bwd", 3.5),
        };
        let flops = passes * 2.0 * pairs * (head_dim + value_dim) as f64;
        let rounded = |number: f64, scale: f64| {
            if number.is_finite() { json!((number * scale).round() / scale) } else { Value::Null }
        };
        let mut line = Map::new();
        let mut put = |name: &str, value: Value| line.insert(name.to_owned(), value);
        put("peer", json!(concat!("annulus-", env!("CARGO_PKG_VERSION"))));
        put("what", json!(name));
        put("dtype", json!(self.dtype.name()));
        put("threads", json!(threads));
        put("batch", json!(batch));
        put("heads", json!(q_heads));
        put("head_dim", json!(head_dim));
        put("n", json!(q_len));
        put("causal", json!(self.causal));
        put("ms", rounded(least.wall * 1e3, 1e3));
        put("gflops", rounded(flops / least.wall / 1e9, 10.0));
        put("gflops_cpu", rounded(flops / (least.cpu / (threads * ranks) as f64) / 1e9, 10.0));
        put("kv_heads", json!(kv_heads));
        put("q_len", json!(q_len));
        put("kv_len", json!(kv_len));
        put("ranks", json!(ranks));
        put("layout", json!(layout));
        put("window", window.map_or(Value::Null, |window| json!([window.left, window.right])));
        put("documents", if documents.is_empty() { Value::Null } else { json!(documents) });
        put(
            "align",
            json!(if self.flags.align == AlignmentName::TopLeft {
                "top-left"
            } else {
                "bottom-right"
            }),
        );
        put("precision", json!(format!("{:?}", self.flags.precision).to_lowercase()));
        put("pairs", json!(pairs));
        put("backend", json!(backend));
        put("clock", json!(clock.name()));
        Value::Object(line).to_string()
    }
}

impl<T: Element, B: Backend<Space: HostTensors>> Rank<T, B> {
    /// A rank with random tensors.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`].
    fn new(plan: Plan<B>, dims: &Dims) -> Result<Self> {
        let normal = |name: &str, rows: &Runs, heads, dim| {
            let stream = Stream::new(0, name);
            let rows: Vec<i64> =
                annulus_core::memory::collect(name, index(rows.len()), rows.iter())?;
            let width = (heads * dim) as u64;
            let mut tensor =
                annulus_core::memory::zeros(name, (dims.batch, rows.len(), heads, dim))?;
            for ((b, i, h, c), element) in tensor.indexed_iter_mut() {
                let line = b as u64 * rows.len() as u64 + rows[i].cast_unsigned();
                *element = T::from_f64(stream.normal(line * width + (h * dim + c) as u64));
            }
            Ok(tensor)
        };
        let (q_rows, kv_rows) = (plan.q_rows(), plan.kv_rows());
        Ok(Self {
            q: normal("query", q_rows, dims.q_heads, dims.head_dim)?,
            k: normal("key", kv_rows, dims.kv_heads, dims.head_dim)?,
            v: normal("value", kv_rows, dims.kv_heads, dims.value_dim)?,
            dout: normal("dout", q_rows, dims.q_heads, dims.value_dim)?,
            plan,
        })
    }

    /// One round: how long it took.
    fn pass(&mut self, what: What, clock: &Clock) -> Result<Duration> {
        let tensors = Tensors::new(self.q.view(), self.k.view(), self.v.view());
        clock.time(|| {
            let forward: Forward<T> = self.plan.forward(&tensors)?;
            if what == What::Both {
                self.plan.backward(&tensors, &forward, self.dout.view(), None)?;
            }
            Ok(())
        })
    }
}
