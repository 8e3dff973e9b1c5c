//! A test problem on ranks: both passes by the facade, and the calls of forward-only workspaces, one
//! rank after another.

use std::{ops::ControlFlow, sync::Arc};

use annulus::{Attention, Division, LocalRing, Plan};
use annulus_core::{
    BackwardInputs, BackwardPass, DType, Element, Gradients, HostBuffer, HostView, HostViewMut,
    Inputs, Outputs, RankShard, Result, RowSet, Rows, Side, Tick,
};
use annulus_cpu::Cpu;
use annulus_plan::Layout;
use annulus_test_cases::{
    Answer, Case,
    facade::{self, CaseTensors},
};
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

    /// Makes a ring of `ranks` ranks, each with its own backend.
    fn ring(
        &self,
        attention: Attention,
        cpu: &Make<'_>,
        layout: &Layout,
        ranks: usize,
    ) -> Result<LocalRing> {
        let dims = self.case().spec.dims;
        let setup = (attention, Division::new().layout(layout.clone()));
        LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
            Plan::with_backend(setup, dims, cpu()?, endpoint)
        })
    }

    /// Computes both passes.
    fn run(&self, cpu: &Make<'_>, layout: &Layout, ranks: usize) -> Result<Answer> {
        let case = self.case();
        let mut ring = self.ring(facade::attention(case), cpu, layout, ranks)?;
        Ok(facade::compute(case, &mut ring, 1, false)?.remove(0))
    }

    /// Returns out and lse of plans without a backward pass.
    fn run_forward(
        &self,
        cpu: &Make<'_>,
        layout: &Layout,
        ranks: usize,
    ) -> Result<(Array4<f64>, Array3<f64>)> {
        let case = self.case();
        let attention = facade::attention(case).forward_only(true);
        let mut ring = self.ring(attention, cpu, layout, ranks)?;
        ring.update(&case.batch)?;
        with_element!(case.spec.dtype, E => {
            let forward = ring.forward(&CaseTensors::<E>::new(case, None).tensors())?;
            Ok((facade::widen(&forward.out), facade::widen(&forward.lse)))
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

/// The shard of a rank alone, and its tensors.
pub(crate) struct Rank {
    pub(crate) shard: RankShard,
    pub(crate) q: Array4<f32>,
    pub(crate) k: Array4<f32>,
    pub(crate) v: Array4<f32>,
    pub(crate) bias: Option<Array4<f32>>,
    pub(crate) sinks: Option<Array4<f32>>,
    pub(crate) dout: Array4<f32>,
    pub(crate) out: Array4<f32>,
    pub(crate) lse: Array4<f32>,
}

impl Rank {
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let (spec, dims) = (&case.spec, case.spec.dims);
        let rows = |side| {
            let layout = Layout::Contiguous;
            let shard = layout.local_shard(&dims, spec.alignment, side, 0, 1, &case.batch);
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows)?;
            Ok(Arc::new(rows))
        };
        let shard = RankShard {
            spec: Arc::new(spec.clone()),
            queries: rows(Side::Q)?,
            keys: rows(Side::Kv)?,
            attention_mask: None,
            key_lists: None,
            received_lists: None,
            most_block_rows: dims.kv_len as u64,
            most_query_rows: dims.q_len as u64,
            leaves: None,
        };
        let [q, k, v, dout] = [&case.q, &case.k, &case.v, &case.dout].map(facade::narrow);
        let sinks = case.sinks.clone().map(|sinks| sinks.insert_axis(Axis(2)));
        let sinks = sinks.map(|sinks| facade::narrow(&sinks.insert_axis(Axis(3))));
        let out = Array4::from_elem(dout.raw_dim(), 7.0);
        let lse = Array4::from_elem((dims.batch, dims.q_heads, dims.q_len, 1), 7.0);
        let bias = case.bias.as_ref().map(facade::narrow);
        Ok(Self { shard, q, k, v, bias, sinks, dout, out, lse })
    }

    pub(crate) fn inputs(&self) -> Inputs<HostView<'_>> {
        Inputs {
            q: Element::view(self.q.view()),
            k: Element::view(self.k.view()),
            v: Element::view(self.v.view()),
            bias: self.bias.as_ref().map(|bias| Element::view(bias.view())),
            sinks: self.sinks.as_ref().map(|sinks| Element::view(sinks.view())),
        }
    }

    pub(crate) fn backward_inputs(&self) -> BackwardInputs<HostView<'_>> {
        BackwardInputs {
            forward: self.inputs(),
            out: Element::view(self.out.view()),
            max: Element::view(self.lse.view()),
            sum: Some(Element::view(self.lse.view())),
            ties: None,
            dout: Element::view(self.dout.view()),
            dlse: None,
            out_residual: None,
        }
    }

    /// Finishes a backward pass. What it does not write is 7, or dbias and dsinks of their inputs.
    pub(crate) fn finish_backward(
        &self,
        pass: annulus_cpu::CpuBackward<'_>,
        dkv: &HostBuffer,
        tick: Tick<'_>,
    ) -> Result<RankGradients> {
        let full = |array: &Array4<f32>| Array4::from_elem(array.raw_dim(), 7.0);
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(full);
        let [mut dbias, mut dsinks] = [self.bias.clone(), self.sinks.clone()];
        let mut gradients = Gradients {
            dbias: dbias.as_mut().map(|dbias| Element::view_mut(dbias.view_mut())),
            dsinks: dsinks.as_mut().map(|dsinks| Element::view_mut(dsinks.view_mut())),
            ..Gradients::new(
                Element::view_mut(dq.view_mut()),
                Element::view_mut(dk.view_mut()),
                Element::view_mut(dv.view_mut()),
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
pub(crate) struct RankGradients {
    pub(crate) dq: Array4<f32>,
    pub(crate) dk: Array4<f32>,
    pub(crate) dv: Array4<f32>,
    pub(crate) dbias: Option<Array4<f32>>,
    dsinks: Option<Array4<f32>>,
}

/// Returns the outputs of a pass without row statistics.
pub(crate) fn outputs<'a>(
    out: impl Into<ArrayViewMut4<'a, f32>>,
    lse: &'a mut Array4<f32>,
) -> Outputs<HostViewMut<'a>> {
    Outputs::new(Element::view_mut(out.into()), Element::view_mut(lse.view_mut()))
}
