//! Ranks that are away and have not failed: busy between two calls, suspended within one, or
//! stopped by a debugger.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::{Error, Result};
use ndarray::Array4;

use crate::{
    harness::{Harness, Verdict, ensure},
    mortal::{End, Moment, Mortal},
};

const DIMS: Dims =
    Dims { batch: 1, q_len: 48, kv_len: 48, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
const DEADLINE: Duration = Duration::from_secs(1);

/// out, lse, dq, dk and dv of a rank, as bits.
type Bits = Vec<u32>;

/// Runs forward and backward.
fn passes(plan: &mut Plan) -> Result<Bits> {
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    let tensor = |heads| {
        Array4::from_shape_fn((1, rows.len(), heads, 4), |(_, row, head, dim)| {
            ((rows[row] * 7 + (head * 3 + dim) as i64) % 11) as f32 * 0.1
        })
    };
    let q = tensor(2);
    let kv = tensor(1);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, q.view(), None)?;
    let all = forward.out.iter().chain(&forward.lse);
    let all = all.chain(&backward.dq).chain(&backward.dk).chain(&backward.dv);
    Ok(all.map(|number| number.to_bits()).collect())
}

fn plan(settings: &Settings, end: Option<(Moment, End)>, setup: &Setup) -> Result<Plan> {
    let transport = Mortal::new(Mpi::world(settings.clone())?, end);
    let setup = setup
        .clone()
        .map_division(|division| division.layout(Layout::Contiguous))
        .map_runtime(|runtime| runtime.deadline(DEADLINE));
    Plan::new(setup, DIMS, transport)
}

/// The last rank, then the first one, makes a call two deadlines after the others: nothing fails.
/// With an arrival deadline the others make their call again.
pub(crate) fn away(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    for arrival_deadline in [None, Some(DEADLINE)] {
        let attention = Setup::from((
            Attention::new(),
            Division::new(),
            Runtime::new().arrival_deadline(arrival_deadline),
        ));
        let late = |plan: &mut Plan, late: usize| {
            if harness.rank() == late {
                thread::sleep(DEADLINE * 2);
            }
            // a plan is refused until the late rank has come, but no longer
            let mut timeouts = 0;
            loop {
                match passes(plan) {
                    Err(Error::ArrivalTimeout { .. }) if timeouts < 10 => timeouts += 1,
                    result => return result.map(|bits| (bits, timeouts)),
                }
            }
        };
        let work = || -> Result<Verdict> {
            let mut plan = plan(settings, None, &attention)?;
            let first = passes(&mut plan)?;
            for rank in [last, 0] {
                let (bits, timeouts) = late(&mut plan, rank)?;
                let waits = arrival_deadline.is_some() && harness.rank() != rank;
                let expected = if waits { 1..=2 } else { 0..=0 };
                if bits != first || !expected.contains(&timeouts) {
                    let equal = bits == first;
                    return Ok(Err(format!("equal bits: {equal}, {timeouts} timeouts")));
                }
            }
            Ok(Ok(()))
        };
        let verdict = work().unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{arrival_deadline:?}: {wrong}")))?;
    }
    Ok(())
}

/// All ranks are stopped within a pass for longer than the deadline, as a scheduler or a paused
/// machine does it: the same bits.
pub(crate) fn suspended(harness: &mut Harness, settings: &Settings) -> Verdict {
    let work = || -> Result<Verdict> {
        let attention = Setup::default();
        let first = passes(&mut plan(settings, None, &attention)?)?;
        let end = (Moment::Transfer(2), End::Suspended(DEADLINE * 5 / 2));
        let bits = passes(&mut plan(settings, Some(end), &attention)?)?;
        Ok(ensure(bits == first, || "other bits after a suspension".to_owned()))
    };
    harness.share(work().unwrap_or_else(|error| Err(error.to_string())))
}

/// One rank is stopped within a pass for longer than the deadline, as by a debugger, and
/// `ANNULUS_DEADLINE` is 0: the others wait, and get the same bits.
pub(crate) fn debugged(harness: &mut Harness, settings: &Settings) -> Verdict {
    let variable = std::env::var(Runtime::DEADLINE_VARIABLE);
    ensure(variable.as_deref() == Ok("0"), || {
        format!("{}: got {variable:?}, want 0", Runtime::DEADLINE_VARIABLE)
    })?;
    let stopped = harness.rank() == harness.ranks() - 1;
    let work = || -> Result<Verdict> {
        let attention = Setup::default();
        let first = passes(&mut plan(settings, None, &attention)?)?;
        let end = (Moment::Transfer(2), End::Suspended(DEADLINE * 5 / 2));
        let started = Instant::now();
        let bits = passes(&mut plan(settings, stopped.then_some(end), &attention)?)?;
        let waited = started.elapsed();
        let is_same = bits == first;
        Ok(ensure(is_same && waited > DEADLINE * 2, || {
            format!("the same bits: {is_same}, after {waited:?}")
        }))
    };
    harness.share(work().unwrap_or_else(|error| Err(error.to_string())))
}
