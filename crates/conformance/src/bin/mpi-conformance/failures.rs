//! What goes wrong beyond the wire: arguments that differ, ranks that die.

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use annulus::{Attention, BackwardMode, Cpu, Dims, Layout, RankPlan, Route, Tensors};
use annulus_comm::{
    Descriptor, agree,
    mpi::{Launch, Mpi, Settings},
};
use annulus_core::{Arrived, Control, Error, Hop, Host, Incoming, Outgoing, Placement, Result, Transport, index};
use ndarray::Array4;

use crate::harness::{Harness, Verdict, ensure};

const DIMS: Dims = Dims { batch: 1, q_len: 24, kv_len: 24, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
/// Of the plans that lose a rank.
const DEADLINE: Duration = Duration::from_secs(1);

fn tensor(rows: usize, heads: usize) -> Array4<f32> {
    Array4::from_elem((1, rows, heads, 4), 0.5)
}

/// Every field of a plan, made different on the last rank; and a descriptor of 40 fields, one after the other.
pub(crate) fn mismatch(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    if last == 0 {
        return Ok(());
    }
    let usual = || (Attention::new().deadline(Duration::from_secs(20)), DIMS, Layout::Contiguous);
    let odd: [(&str, (Attention, Dims, Layout)); 18] = [
        ("q_len", (usual().0, Dims { q_len: 25, ..DIMS }, Layout::Contiguous)),
        ("kv_len", (usual().0, Dims { kv_len: 25, ..DIMS }, Layout::Contiguous)),
        ("batch", (usual().0, Dims { batch: 2, ..DIMS }, Layout::Contiguous)),
        ("q_heads", (usual().0, Dims { q_heads: 4, ..DIMS }, Layout::Contiguous)),
        ("head_dim", (usual().0, Dims { head_dim: 8, ..DIMS }, Layout::Contiguous)),
        ("value_dim", (usual().0, Dims { value_dim: 8, ..DIMS }, Layout::Contiguous)),
        ("dtype", (usual().0.dtype(annulus::DType::F64), DIMS, Layout::Contiguous)),
        ("mask", (usual().0.causal(), DIMS, Layout::Contiguous)),
        ("alignment", (usual().0.align(annulus::Alignment::BottomRight), DIMS, Layout::Contiguous)),
        ("softmax_scale", (usual().0.scale(0.3), DIMS, Layout::Contiguous)),
        ("logits_soft_cap", (usual().0.soft_cap(3.0), DIMS, Layout::Contiguous)),
        ("bias", (usual().0.bias([1, 1, 1, 24]), DIMS, Layout::Contiguous)),
        ("softmax_aux", (usual().0.shared_sinks(2), DIMS, Layout::Contiguous)),
        ("normalize_output", (usual().0.unnormalized(), DIMS, Layout::Contiguous)),
        ("dropout_prob", (usual().0.dropout(0.25, 1), DIMS, Layout::Contiguous)),
        ("backward_mode", (usual().0.backward_mode(BackwardMode::TwoPass), DIMS, Layout::Contiguous)),
        ("layout", (usual().0, DIMS, Layout::Zigzag)),
        ("route", (usual().0.route(Route::Direct), DIMS, Layout::Contiguous)),
    ];
    for (name, odd) in odd {
        let (attention, dims, layout) = if harness.rank() == last { odd } else { usual() };
        let started = Instant::now();
        let made = Mpi::world(settings.clone())
            .and_then(|transport| RankPlan::new(&attention, dims, Some(layout), Cpu::new(1)?, transport))
            .map(|_| "a plan");
        let took = started.elapsed();
        let named = matches!(&made, Err(Error::RankMismatch { field, rank, .. }) if field == name && *rank == last);
        same_everywhere(harness, &made, named && took < Duration::from_secs(1), || format!("{name}: {made:?} after {took:?}"))?;
    }
    fields(harness, settings, last)
}

/// Each of 40 fields, over one endpoint: a mismatch is no failure of the transport's.
fn fields(harness: &mut Harness, settings: &Settings, last: usize) -> Verdict {
    const NAMES: [&str; 40] = [
        "f00", "f01", "f02", "f03", "f04", "f05", "f06", "f07", "f08", "f09", "f10", "f11", "f12", "f13", "f14", "f15", "f16", "f17",
        "f18", "f19", "f20", "f21", "f22", "f23", "f24", "f25", "f26", "f27", "f28", "f29", "f30", "f31", "f32", "f33", "f34", "f35",
        "f36", "f37", "f38", "f39",
    ];
    let mut transport = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
    for (odd, name) in NAMES.into_iter().enumerate() {
        let value = |place: usize| u64::from(place == odd && harness.rank() == last);
        let descriptor = NAMES.into_iter().enumerate().fold(Descriptor::new(), |d, (place, name)| d.field(name, value(place)));
        let agreed = agree::<Host>(&mut transport, odd as u64, Ok(descriptor));
        let want = Error::RankMismatch { field: name.to_owned(), rank: last, got: "1".to_owned(), rank0: "0".to_owned() };
        let right = agreed == Err(want) && transport.bytes_sent() == 0;
        same_everywhere(harness, &agreed, right, || format!("{name}: {agreed:?}"))?;
    }
    Ok(())
}

/// `result` reads alike on all ranks, and is `right` on each.
fn same_everywhere<T: std::fmt::Debug>(harness: &mut Harness, result: &Result<T>, right: bool, what: impl Fn() -> String) -> Verdict {
    harness.share(ensure(right, &what))?;
    let all = harness.gather(format!("{result:?}").as_bytes())?;
    ensure(all.iter().all(|text| *text == all[0]), || format!("{}: different on some rank", what()))
}

/// The last rank panics while the others wait for it.
pub(crate) fn panic(harness: &mut Harness, settings: &Settings) -> Verdict {
    let mut transport = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
    let last = harness.ranks() - 1;
    assert!(harness.rank() != last, "rank {last} panics on purpose");
    annulus_comm::barrier::<Host>(&mut transport, 1).map_err(|error| error.to_string())?;
    harness.share(Ok(()))
}

/// Rank 1 is killed before its first, a middle or its last transfer of a pass; the others report, and leave MPI as it is.
pub(crate) fn lost(launch: Launch, mut harness: Harness, settings: &Settings, pass: &str, moment: &str) -> Verdict {
    // full attention posts alike on every rank
    let counts = plan(settings, None, Duration::from_secs(30)).and_then(|mut plan| passes(&mut plan)).map_err(|error| error.to_string());
    harness.share(counts.as_ref().map(drop).map_err(Clone::clone))?;
    let [forward, both] = counts?;
    let kill_at = match (pass, moment) {
        ("forward", "first") => 0,
        ("forward", "middle") => forward / 2,
        ("forward", "last") => forward - 1,
        ("backward", "first") => forward,
        ("backward", "middle") => forward.midpoint(both),
        ("backward", "last") => both - 1,
        _ => return Err("want forward|backward first|middle|last".to_owned()),
    };
    let kill_at = (harness.rank() == 1).then_some(kill_at);
    let mut plan = plan(settings, kill_at, DEADLINE).map_err(|error| error.to_string())?;
    let started = Instant::now();
    let result = passes(&mut plan).map(drop);
    let took = started.elapsed();
    let named = match &result {
        Err(Error::Timeout { peer: 1, .. } | Error::PeerLost { peer: 1, .. }) => true,
        Err(Error::Aborted { what, .. }) => what.contains("rank 1 ") && what.contains("step "),
        _ => false,
    };
    let right = named && took <= DEADLINE + Duration::from_secs(1);
    println!("{} rank {}: {result:?} after {took:?}", if right { "survivor" } else { "WRONG" }, harness.rank());
    // dropped endpoints wait for nobody after a failure; the harness has not failed, so it is left alone
    drop(plan);
    std::mem::forget(harness);
    launch.abandon();
    std::process::exit(i32::from(!right))
}

fn plan(settings: &Settings, kill_at: Option<u64>, deadline: Duration) -> Result<RankPlan<Cpu>> {
    POSTS.store(0, Ordering::Relaxed);
    let transport = Mortal { inner: Mpi::world(settings.clone())?, kill_at };
    RankPlan::new(&Attention::new().deadline(deadline), DIMS, Some(Layout::Contiguous), Cpu::new(1)?, transport)
}

/// Groups that the plan at hand has posted.
static POSTS: AtomicU64 = AtomicU64::new(0);

/// Forward and backward of full attention; how many groups were posted after each.
fn passes(plan: &mut RankPlan<Cpu>) -> Result<[u64; 2]> {
    let posts = || POSTS.load(Ordering::Relaxed);
    let rows = index(plan.q_rows().len());
    let (q, kv) = (tensor(rows, 2), tensor(rows, 1));
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    let between = posts();
    plan.backward(&tensors, &forward, q.view(), None)?;
    Ok([between, posts()])
}

/// An endpoint whose process is killed, as by the system, when it posts for the n-th time.
struct Mortal {
    inner: Mpi,
    kill_at: Option<u64>,
}

impl Transport<Host> for Mortal {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, Host>], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        if Some(POSTS.fetch_add(1, Ordering::Relaxed)) == self.kill_at {
            let killed = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            return Err(Error::Device { what: format!("this process could not be killed: {killed:?}") });
        }
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(patience)
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<Host>>> {
        self.inner.take(hop)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl Control for Mortal {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.offer(round, bytes)
    }

    fn collect(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.inner.collect(round)
    }

    fn missing(&self, round: u64) -> Vec<usize> {
        self.inner.missing(round)
    }

    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }

    fn beat(&mut self, working: bool) {
        self.inner.beat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.inner.placement()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.inner.last_work()
    }
}
