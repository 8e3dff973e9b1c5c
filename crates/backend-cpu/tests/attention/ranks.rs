//! A test problem on ranks: both passes by the facade, and the calls of forward-only workspaces, one
//! rank after another.

use std::{ops::ControlFlow, sync::Arc};

use annulus::{Division, LocalRing, Plan, Tensors};
use annulus_core::{
    BackwardInputs, BackwardPass, DType, Element, Gradients, HostBuffer, HostView, HostViewMut,
    Inputs, Outputs, RankShard, Result, RowSet, Rows, Side, Tick,
};
use annulus_cpu::Cpu;
use annulus_plan::Layout;
use annulus_test_cases::{Answer, Case, facade};
use half::{bf16, f16};
use ndarray::{Array3, Array4, ArrayViewMut4, Axis};

/// Evaluates `$call` with `$element` as the element type `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $call:expr) => {
        match $dtype {
            DType::F64 => with_element!(@ $element, f64, $call),
            DType::F32 => with_element!(@ $element, f32, $call),
            DType::Bf16 => with_element!(@ $element, bf16, $call),
            DType::F16 => with_element!(@ $element, f16, $call),
        }
    };
    (@ $element:ident, $type:ty, $call:expr) => {{
        type $element = $type;
        $call
    }};
}

/// Makes the backend of a rank.
pub(crate) type Make<'a> = dyn Fn() -> Result<Cpu> + Sync + 'a;

/// A case on ranks.
pub(crate) trait OnRanks {
    fn case(&self) -> &Case;

    /// Computes both passes on a ring of `ranks` ranks, each with its own backend.
    fn run(&self, cpu: &Make<'_>, layout: &Layout, ranks: usize) -> Result<Answer> {
        let (case, dims) = (self.case(), self.case().spec.dims);
        let attention = facade::attention(case).reproducible(case.spec.leaf_rows.is_some());
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
            Plan::with_backend(setup, dims, cpu()?, endpoint)
        })?;
        Ok(facade::compute(case, &mut ring, 1, false)?.remove(0))
    }

    /// Returns out and lse of plans without a backward pass.
    fn run_forward(
        &self,
        cpu: &Make<'_>,
        layout: &Layout,
        ranks: usize,
    ) -> Result<(Array4<f64>, Array3<f64>)> {
        let (case, dims) = (self.case(), self.case().spec.dims);
        let attention = facade::attention(case).forward_only(true);
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
            Plan::with_backend(setup, dims, cpu()?, endpoint)
        })?;
        ring.update(&case.batch)?;
        with_element!(case.spec.dtype, E => {
            let [q, k, v] = [&case.q, &case.k, &case.v].map(facade::narrow::<E, _>);
            let bias = case.bias.as_ref().map(facade::narrow);
            let sinks = case.sinks.as_ref().map(facade::narrow);
            let forward = ring.forward(&Tensors {
                bias: bias.as_ref().map(|bias| bias.view()),
                softmax_aux: sinks.as_ref().map(|sinks| sinks.view()),
                ..Tensors::new(q.view(), k.view(), v.view())
            })?;
            Ok((forward.out.mapv(E::to_f64), forward.lse.mapv(|x| x.to_f64())))
        })
    }
}

impl OnRanks for Case {
    fn case(&self) -> &Case {
        self
    }
}

/// Source of the keys and values of a pass's own rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocalKv {
    /// In the records that it packed.
    Records,
    /// In its inputs. No record is packed.
    Inputs,
}

impl LocalKv {
    /// Returns the local keys that are packed, of `keys` keys, if no other rank reads them.
    pub(crate) fn sent(self, keys: usize) -> RowSet {
        RowSet::all(if self == Self::Records { keys as u64 } else { 0 })
    }

    /// Returns [`Block::first_local`] of the block of all local keys.
    pub(crate) fn first_local(self) -> Option<usize> {
        (self == Self::Inputs).then_some(0)
    }
}

/// A tick that never stops a call.
pub(crate) fn keep_going() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// One rank's shard.
pub(crate) struct Rank<E: Element> {
    pub(crate) shard: RankShard,
    pub(crate) q: Array4<E>,
    pub(crate) k: Array4<E>,
    pub(crate) v: Array4<E>,
    pub(crate) bias: Option<Array4<E::Accumulator>>,
    pub(crate) sinks: Option<Array4<E::Accumulator>>,
    pub(crate) dout: Array4<E>,
    pub(crate) dlse: Option<Array4<E::Accumulator>>,
    pub(crate) out: Array4<E>,
    pub(crate) lse: Array4<E::Accumulator>,
    pub(crate) max: Array4<E::Accumulator>,
    pub(crate) sum: Array4<E::Accumulator>,
    pub(crate) ties: Option<Array4<E::Accumulator>>,
}

pub(crate) fn typed<E: Element>(array: &Array4<f64>) -> Array4<E> {
    array.mapv(E::from_f64)
}

fn rows_of(array: &Array4<f64>, axis: usize, rows: &[u64]) -> Array4<f64> {
    let rows: Vec<usize> = rows.iter().map(|&row| row as usize).collect();
    array.select(Axis(axis), &rows)
}

impl<E: Element> Rank<E> {
    pub(crate) fn new(case: &Case, layout: &Layout, rank: usize, ranks: usize) -> Result<Self> {
        let spec = &case.spec;
        let dims = spec.dims;
        let numbers = |side, len| -> Vec<u64> {
            layout.shard(side, len, rank, ranks).iter().map(i64::cast_unsigned).collect()
        };
        let q_rows = numbers(Side::Q, dims.q_len);
        let kv_rows = numbers(Side::Kv, dims.kv_len);
        let batch = case.batch.select(&q_rows, &kv_rows).unwrap();
        let shard = |side| {
            let shard = layout.local_shard(&dims, spec.alignment, side, rank, ranks, &batch);
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows).unwrap();
            Arc::new(rows)
        };
        let most = |side, len| {
            (0..ranks).map(|rank| layout.shard(side, len, rank, ranks).len()).max().unwrap_or(0)
        };
        let rank_shard = RankShard {
            spec: Arc::new(spec.clone()),
            queries: shard(Side::Q),
            keys: shard(Side::Kv),
            attention_mask: batch.attention_mask.clone().map(Arc::new),
            key_lists: batch.key_lists.clone(),
            received_lists: None,
            most_block_rows: most(Side::Kv, dims.kv_len),
            most_query_rows: most(Side::Q, dims.q_len),
            leaves: None,
        };
        let lines = |wanted: bool| {
            wanted.then(|| {
                Array4::from_elem(
                    (dims.batch, dims.q_heads, q_rows.len(), 1),
                    E::Accumulator::from_f64(7.0),
                )
            })
        };
        let bias_rows = |bias: &Array4<f64>| {
            if spec.bias.is_some_and(|shape| shape[2] == 1 && dims.q_len != 1) {
                bias.clone()
            } else {
                rows_of(bias, 2, &q_rows)
            }
        };
        Ok(Self {
            q: typed(&rows_of(&case.q, 1, &q_rows)),
            k: typed(&rows_of(&case.k, 1, &kv_rows)),
            v: typed(&rows_of(&case.v, 1, &kv_rows)),
            bias: case.bias.as_ref().map(|bias| typed(&bias_rows(bias))),
            sinks: case
                .sinks
                .as_ref()
                .map(|sinks| typed(&sinks.clone().insert_axis(Axis(2)).insert_axis(Axis(3)))),
            dout: typed(&rows_of(&case.dout, 1, &q_rows)),
            dlse: case
                .dlse
                .as_ref()
                .map(|dlse| typed(&rows_of(&dlse.clone().insert_axis(Axis(3)), 2, &q_rows))),
            out: Array4::from_elem(
                (dims.batch, q_rows.len(), dims.q_heads, dims.value_dim),
                E::from_f64(7.0),
            ),
            lse: lines(true).unwrap(),
            max: lines(true).unwrap(),
            sum: lines(true).unwrap(),
            ties: lines(!spec.normalize),
            shard: rank_shard,
        })
    }

    pub(crate) fn inputs(&self) -> Inputs<HostView<'_>> {
        Inputs {
            q: E::view(self.q.view()),
            k: E::view(self.k.view()),
            v: E::view(self.v.view()),
            bias: self.bias.as_ref().map(|bias| Element::view(bias.view())),
            sinks: self.sinks.as_ref().map(|sinks| Element::view(sinks.view())),
        }
    }

    pub(crate) fn backward_inputs(&self) -> BackwardInputs<HostView<'_>> {
        BackwardInputs {
            forward: self.inputs(),
            out: E::view(self.out.view()),
            max: Element::view(self.max.view()),
            sum: Some(Element::view(self.sum.view())),
            ties: self.ties.as_ref().map(|ties| Element::view(ties.view())),
            dout: E::view(self.dout.view()),
            dlse: self.dlse.as_ref().map(|dlse| Element::view(dlse.view())),
            out_residual: None,
        }
    }

    /// Finishes a backward pass. What it does not write is 7, or dbias and dsinks of their inputs.
    pub(crate) fn finish_backward(
        &self,
        pass: annulus_cpu::CpuBackward<'_>,
        dkv: &HostBuffer,
        tick: Tick<'_>,
    ) -> Result<RankGradients<E>> {
        let full = |array: &Array4<E>| Array4::from_elem(array.raw_dim(), E::from_f64(7.0));
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(full);
        let [mut dbias, mut dsinks] = [self.bias.clone(), self.sinks.clone()];
        let mut gradients = Gradients {
            dbias: dbias.as_mut().map(|dbias| Element::view_mut(dbias.view_mut())),
            dsinks: dsinks.as_mut().map(|dsinks| Element::view_mut(dsinks.view_mut())),
            ..Gradients::new(
                E::view_mut(dq.view_mut()),
                E::view_mut(dk.view_mut()),
                E::view_mut(dv.view_mut()),
            )
        };
        pass.finish(dkv, &mut gradients, tick)?;
        Ok(RankGradients { dq, dk, dv, dbias, dsinks })
    }

    /// Returns a zeroed buffer for the records of all keys.
    pub(crate) fn keys_buffer(&self, record: annulus_core::RowLayout) -> Result<HostBuffer> {
        HostBuffer::zeroed(record.bytes() * self.shard.keys.len() as u64)
    }
}

/// Gradients of one rank.
#[derive(PartialEq)]
pub(crate) struct RankGradients<E: Element> {
    pub(crate) dq: Array4<E>,
    pub(crate) dk: Array4<E>,
    pub(crate) dv: Array4<E>,
    pub(crate) dbias: Option<Array4<E::Accumulator>>,
    dsinks: Option<Array4<E::Accumulator>>,
}

/// Returns the outputs of a pass without row statistics.
pub(crate) fn outputs<'a, E: Element>(
    out: impl Into<ArrayViewMut4<'a, E>>,
    lse: &'a mut Array4<E::Accumulator>,
) -> Outputs<HostViewMut<'a>> {
    Outputs::new(E::view_mut(out.into()), Element::view_mut(lse.view_mut()))
}
