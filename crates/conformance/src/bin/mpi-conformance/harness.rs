//! Exchange of verdicts between the ranks of a test, over an endpoint of its own. And the passes of
//! a plan of two query heads and one KV head, both of 4 elements.

use std::time::Duration;

use annulus::{Plan, Tensors};
use annulus_comm::{
    Deadline, all_gather,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Host, Result};
use ndarray::Array4;

/// `Ok`, or the failure as text.
pub(crate) type Verdict = std::result::Result<(), String>;

/// Longest wait of a rank for the others, which may compute a slow case meanwhile.
const DEADLINE: Duration = Duration::from_secs(120);

/// One rank of a test.
pub(crate) struct Harness {
    endpoint: Deadline<Mpi, Host>,
    round: u64,
}

impl Harness {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { endpoint: Deadline::new(Mpi::world(Settings::default())?, DEADLINE)?, round: 0 })
    }

    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Returns every rank's bytes. Collective.
    pub(crate) fn gather(&mut self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String> {
        self.round += 1;
        all_gather::<Host>(&mut self.endpoint, self.round, bytes)
            .map_err(|error| format!("the harness: {error}"))
    }

    /// Returns the first failure of any rank, the same on every rank. Collective.
    pub(crate) fn share(&mut self, verdict: Verdict) -> Verdict {
        let text = verdict.err().unwrap_or_default();
        let all = self.gather(text.as_bytes())?;
        match all.iter().enumerate().find(|(_, text)| !text.is_empty()) {
            None => Ok(()),
            Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text))),
        }
    }
}

/// Returns an error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}

/// Returns q and k of a rank's rows, which differ between rows and heads.
pub(crate) fn tensors(plan: &Plan) -> [Array4<f32>; 2] {
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    [2, 1].map(|heads| {
        Array4::from_shape_fn((1, rows.len(), heads, 4), |(_, row, head, dim)| {
            ((rows[row] * 7 + (head * 3 + dim) as i64) % 11) as f32 * 0.1
        })
    })
}

/// out, lse, dq, dk and dv of a rank, as bits.
pub(crate) type Bits = Vec<u32>;

/// Runs forward and backward; calls `between` after the forward pass.
pub(crate) fn passes(plan: &mut Plan, between: impl FnOnce()) -> Result<Bits> {
    let [q, kv] = tensors(plan);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    between();
    let backward = plan.backward(&tensors, &forward, q.view(), None)?;
    let all = forward.out.iter().chain(&forward.lse);
    let all = all.chain(&backward.dq).chain(&backward.dk).chain(&backward.dv);
    Ok(all.map(|number| number.to_bits()).collect())
}

/// Runs forward and backward.
pub(crate) fn bits(plan: &mut Plan) -> Result<Bits> {
    passes(plan, || ())
}
