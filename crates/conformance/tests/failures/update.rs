//! An `update` takes effect on all ranks or on none. After a refusal every rank computes the old
//! batch, to the oracle's numbers. If the old batch cannot be restored, the plan ends on all ranks.
//! The three ranks have unequal shards, so that batches differ in their messages and in the memory
//! that they need.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Division, LocalRing, Plan, Result, Runtime, Setup, Tensors,
    comm::threads::{each_rank, ring},
};
use annulus_conformance::{Case, Draw, Judge, Masks, compute};
use annulus_core::{
    Backend, BackwardInputs, BackwardMode, Batch, Control, DType, Dims, Error, Fingerprint, Host,
    HostView, Inputs, KeyIntervals, Mask, Passes, RankShard, Spec, Tick, Transport, Workspace,
    mask::{Key, Query},
};
use annulus_cpu::Cpu;
use annulus_plan::{Layout, Route, Strategy};
use ndarray::{Array2, Array4};

const RANKS: usize = 3;
/// Shards of 4, 3 and 3 rows.
const DIMS: Dims =
    Dims { batch: 2, q_len: 10, kv_len: 10, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 8 };

/// Returns a batch of segments that start at these rows.
fn segments(begins: &[usize]) -> Batch {
    let segment = |row| {
        i32::try_from(begins.iter().filter(|&&begin| begin <= row).count()).expect("a few segments")
    };
    Batch {
        q_segment_ids: Some(Array2::from_shape_fn((DIMS.batch, DIMS.q_len), |(_, row)| {
            segment(row)
        })),
        ..Batch::default()
    }
}

/// Returns four batches: no segments; one segment a rank, so that no block is sent; segments across
/// shards; positions.
fn batches() -> [Batch; 4] {
    let reversed = || {
        Some(Array2::from_shape_fn((DIMS.batch, DIMS.q_len), |(_, row)| (DIMS.q_len - row) as i64))
    };
    let positions = Batch { q_positions: reversed(), kv_positions: reversed(), ..Batch::default() };
    [Batch::default(), segments(&[4, 7]), segments(&[2, 5]), positions]
}

/// Returns causal attention in f64 with this batch.
fn case(batch: &Batch, backward: BackwardMode) -> Case {
    let spec = Spec { backward, ..Spec::new(DIMS, DType::F64) };
    let mut case =
        Case::new("update", spec, Masks { causal: true, ..Masks::default() }, &mut Draw::new(7));
    case.batch = batch.clone();
    case
}

fn scripts(ranks: usize) -> Vec<Script> {
    (0..ranks).map(|_| Script::default()).collect()
}

fn plan_of(setup: &Setup, scripts: &[Script]) -> LocalRing {
    let setup = setup.clone().map_division(|division| division.layout(Layout::Contiguous));
    let ring = LocalRing::from_plans(setup, DIMS, scripts.len(), |rank, setup, endpoint| {
        let backend = Refusing { inner: Cpu::new(1)?, script: scripts[rank].clone() };
        Plan::with_backend(setup, DIMS, backend, endpoint)
    });
    ring.expect("a plan")
}

/// Refuses on `rank` of `ranks` the update from each batch to each other one, with these acts, and
/// compares every answer with the oracle.
fn refuse_on(setup: &Setup, backward: BackwardMode, [ranks, rank]: [usize; 2], acts: &[Act]) {
    let tensors = case(&Batch::default(), backward);
    let batches = batches();
    let judge = |batch| Judge::new(&case(batch, backward)).expect("a valid case");
    let judges = batches.each_ref().map(judge);
    let scripts = scripts(ranks);
    let mut plan = plan_of(setup, &scripts);
    for old in 0..batches.len() {
        for new in (0..batches.len()).filter(|&new| new != old) {
            let check = |plan: &mut LocalRing, batch: usize, when: &str| {
                let got = compute(&tensors, plan, 1, true).map_err(|error| error.to_string());
                let verdict = got.and_then(|got| judges[batch].check(&got[0]));
                verdict.unwrap_or_else(|wrong| {
                    panic!("{old} -> {new}, {acts:?} on rank {rank}, {when}: {wrong}")
                });
            };
            plan.update(&batches[old]).expect("a good batch");
            check(&mut plan, old, "before");
            scripts[rank].set(acts);
            let refused = plan.update(&batches[new]).expect_err("a refusal");
            assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
            scripts[rank].set(&[]);
            check(&mut plan, old, "after a refusal");
            plan.update(&batches[new]).expect("a good batch");
            check(&mut plan, new, "after an update");
        }
    }
}

#[test]
fn an_update_that_one_rank_refuses_leaves_the_old_batch_in_force_on_all() {
    // with the last, the update back to the old batch fails too
    let all: [&[Act]; 3] =
        [&[Act::Refuse], &[Act::ApplyThenRefuse], &[Act::ApplyThenRefuse, Act::Refuse]];
    let heads = |heads| Division::new().strategy(Strategy::HeadsRing { heads });
    let grid = |queries, keys| Division::new().strategy(Strategy::Grid { heads: 1, queries, keys });
    let one_pass = BackwardMode::OnePass;
    for (division, backward, of_ranks, acts) in [
        (Division::new(), one_pass, [RANKS, 0], &all[..]),
        (Division::new(), one_pass, [RANKS, 1], &all),
        (Division::new(), one_pass, [RANKS, 2], &all),
        (Division::new(), BackwardMode::TwoPass, [RANKS, 1], &all[1..2]),
        (Division::new().route(Route::Direct), one_pass, [RANKS, 1], &all[1..2]),
        // ranks of other inner rings than the one that refuses have been updated, and go back
        (heads(2), one_pass, [4, 0], &all),
        (heads(2), one_pass, [4, 3], &all),
        (heads(4), one_pass, [4, 1], &all),
        // so do rings of other key columns
        (grid(2, 2), one_pass, [4, 0], &all),
        (grid(2, 2), one_pass, [4, 3], &all),
        (grid(1, 4), one_pass, [4, 1], &all),
    ] {
        let attention = Attention::new().dtype(DType::F64).causal(true).backward_mode(backward);
        let setup = Setup::from((attention, division));
        acts.iter().for_each(|acts| refuse_on(&setup, backward, of_ranks, acts));
    }
}

/// Returns the state of one rank's plan as text: rows, layout, schedule, work.
fn state(plan: &Plan) -> String {
    format!(
        "{:?} {:?} {:?} {:?} {:?}",
        plan.q_rows(),
        plan.kv_rows(),
        plan.layout(),
        plan.schedule(),
        plan.work()
    )
}

/// Runs on every rank an update to segments, one whose arguments `rank` refuses, and a valid one.
#[test]
fn an_argument_that_one_rank_refuses_changes_nothing_on_any() {
    let bad = |batch: Batch| Batch { q_positions: Some(Array2::zeros((DIMS.batch, 1))), ..batch };
    each_rank(ring(RANKS), |rank, transport| {
        let attention = Setup::from((
            Attention::new().dtype(DType::F64).causal(true),
            Division::new().layout(Layout::Contiguous),
            Runtime::new().deadline(Duration::from_secs(10)),
        ));
        let mut plan = Plan::new(&attention, DIMS, transport)?;
        let rows: Vec<u64> = plan.q_rows().iter().map(i64::cast_unsigned).collect();
        let x = Array4::from_shape_fn(
            (DIMS.batch, rows.len(), DIMS.q_heads, DIMS.head_dim),
            |(b, i, h, c)| ((rows[i] as usize * 7 + b * 5 + h * 3 + c) % 11) as f64 * 0.1,
        );
        let y = x.slice(ndarray::s![.., .., ..DIMS.kv_heads, ..]).to_owned();
        let tensors = Tensors::new(x.view(), y.view(), y.view());
        let [_, old, new, _] = batches().map(|batch| batch.select(&rows, &rows).unwrap());
        plan.update(&old)?;
        let before = (state(&plan), plan.forward(&tensors)?.out);
        for odd in 0..RANKS {
            let refused =
                plan.update(&if rank == odd { bad(new.clone()) } else { new.clone() }).unwrap_err();
            match refused {
                Error::InvalidArgument { argument, .. } if rank == odd => {
                    assert_eq!(argument, "q_positions")
                }
                Error::Refused { rank: by, .. } if rank != odd => assert_eq!(by, odd),
                other => panic!("rank {rank}: {other}"),
            }
            assert_eq!((state(&plan), plan.forward(&tensors)?.out), before, "rank {rank}");
        }
        plan.update(&new)?;
        let after = (state(&plan), plan.forward(&tensors)?.out);
        assert_ne!(after.0, before.0, "rank {rank}");
        assert_ne!(after.1, before.1, "rank {rank}");
        Ok(())
    })
    .unwrap();
}

/// Returns every rank's error of an update and of the forward pass after it. Both must fail before
/// the deadline.
fn doomed<B: Backend<Space = Host>>(
    attention: &Attention,
    make: impl Fn(usize) -> Result<B> + Sync,
    choke: impl Fn(usize) -> Option<u64> + Sync,
    before_update: impl Fn(usize) + Sync,
) -> Vec<[Error; 2]> {
    let attention = Setup::from((
        attention.clone().dtype(DType::F64),
        Division::new().layout(Layout::Contiguous),
        Runtime::new().deadline(Duration::from_secs(10)),
    ));
    let started = Instant::now();
    let errors = each_rank(ring(RANKS), |rank, transport| {
        let transport = Choking { inner: transport, round: choke(rank) };
        let mut plan = Plan::with_backend(&attention, DIMS, make(rank)?, transport)?;
        let rows: Vec<u64> = plan.q_rows().iter().map(i64::cast_unsigned).collect();
        before_update(rank);
        let update = plan
            .update(&segments(&[2, 5]).select(&rows, &rows)?)
            .expect_err("an update that fails");
        let x = Array4::<f64>::zeros((DIMS.batch, rows.len(), DIMS.q_heads, DIMS.head_dim));
        let y = Array4::<f64>::zeros((DIMS.batch, rows.len(), DIMS.kv_heads, DIMS.head_dim));
        let forward = plan
            .forward(&Tensors::new(x.view(), y.view(), y.view()))
            .expect_err("a plan that is dead");
        Ok([update, forward])
    });
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    errors.expect("no rank panics")
}

#[test]
fn an_old_batch_that_cannot_be_restored_ends_the_plan_on_all_ranks() {
    let scripts = scripts(RANKS);
    let make = |rank: usize| Ok(Refusing { inner: Cpu::new(1)?, script: scripts[rank].clone() });
    let script = |rank: usize| match rank {
        // the new batch is applied; the update back to the old one fails, and so does a new
        // workspace
        0 => scripts[rank].set(&[Act::Apply, Act::Refuse, Act::Refuse]),
        1 => scripts[rank].set(&[Act::Refuse]),
        _ => {}
    };
    let errors = doomed(&Attention::new(), make, |_| None, script);
    assert!(
        matches!(&errors[0][0], Error::Device { what } if what.contains("could not be restored")),
        "{errors:?}"
    );
    assert!(matches!(&errors[1][0], Error::OutOfMemory { .. }), "{errors:?}");
    // rank 1's refusal or rank 0's abort in consequence, in any order
    let refused_or_aborted =
        matches!(&errors[2][0], Error::Refused { rank: 1, .. } | Error::Aborted { rank: 0, .. });
    assert!(refused_or_aborted, "{errors:?}");
    assert!(errors.iter().all(|[_, forward]| forward.is_fatal()), "{errors:?}");
}

#[test]
fn a_device_that_fails_in_an_update_ends_the_plan_on_all_ranks() {
    let scripts = scripts(RANKS);
    let make = |rank: usize| Ok(Refusing { inner: Cpu::new(1)?, script: scripts[rank].clone() });
    let errors = doomed(
        &Attention::new(),
        make,
        |_| None,
        |rank| scripts[rank].set(if rank == 2 { &[Act::Break] } else { &[] }),
    );
    assert!(errors.iter().flatten().all(Error::is_fatal), "{errors:?}");
}

/// A causal mask whose intervals panic on rank 1 once it is armed.
#[derive(Debug)]
struct Panicking(AtomicBool);

impl Mask for Panicking {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("panicking")
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let here = thread::current().name() == Some("rank 1");
        assert!(!here || !self.0.load(Ordering::Relaxed), "thirteen");
        Some(KeyIntervals::one(i64::MIN, query.position + 1))
    }
}

#[test]
fn a_mask_that_panics_in_an_update_ends_the_plan_on_all_ranks() {
    let mask = Arc::new(Panicking(AtomicBool::new(false)));
    let attention = Attention::new().mask(Arc::clone(&mask) as Arc<dyn Mask>);
    let arm = |_| mask.0.store(true, Ordering::Relaxed);
    let errors = doomed(&attention, |_| Cpu::new(1), |_| None, arm);
    assert!(
        matches!(&errors[1][0], Error::Internal { what } if what.contains("thirteen")),
        "{errors:?}"
    );
    assert!(errors.iter().flatten().all(Error::is_fatal), "{errors:?}");
}

#[test]
fn ids_that_cannot_be_sent_on_one_rank_do_not_leave_the_others_waiting() {
    // rounds 0 and 1 plan, 2 compares the arguments of the update, 3 gathers ids
    let errors =
        doomed(&Attention::new(), |_| Cpu::new(1), |rank| (rank == 1).then_some(3), |_| ());
    assert!(
        matches!(&errors[1][0], Error::Device { what } if what.contains("is not supported")),
        "{errors:?}"
    );
    assert!(errors.iter().flatten().all(Error::is_fatal), "{errors:?}");
    assert!(matches!(&errors[0][0], Error::Aborted { rank: 1, .. }), "{errors:?}");
}

#[test]
fn a_mask_that_panics_during_planning_is_an_error_on_all_ranks() {
    let mask = Arc::new(Panicking(AtomicBool::new(true)));
    let attention = Setup::from((
        Attention::new().mask(mask),
        Division::new().layout(Layout::Contiguous),
        Runtime::new().deadline(Duration::from_secs(10)),
    ));
    let errors = each_rank(ring(RANKS), |_, transport| {
        let made = Plan::new(&attention, DIMS, transport);
        Ok(made.map(drop).unwrap_err())
    });
    let errors = errors.unwrap();
    assert!(
        matches!(&errors[1], Error::Internal { what } if what.contains("thirteen")),
        "{errors:?}"
    );
    for rank in [0, 2] {
        assert!(matches!(&errors[rank], Error::Aborted { rank: 1, .. }), "{errors:?}");
    }
}

/// A causal mask that is slow on rank 1 for the queries of rank 0. Backends evaluate masks for
/// their own queries only, so it is slow in planning alone.
#[derive(Debug)]
struct SlowToPlan;

impl Mask for SlowToPlan {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("slow to plan")
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        key.position <= query.position
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        if query.row < 400 && thread::current().name() == Some("rank 1") {
            thread::sleep(Duration::from_millis(5));
        }
        Some(KeyIntervals::one(i64::MIN, query.position + 1))
    }
}

#[test]
fn a_rank_that_plans_for_several_deadlines_is_alive() {
    let dims = Dims { q_len: 1200, kv_len: 1200, batch: 1, ..DIMS };
    let deadline = Duration::from_secs(1);
    let attention = Setup::from((
        Attention::new().mask(Arc::new(SlowToPlan)),
        Division::new().layout(Layout::Contiguous).route(Route::RelayUp),
        Runtime::new().deadline(deadline),
    ));
    let slow = each_rank(ring(RANKS), |rank, transport| {
        let started = Instant::now();
        let mut plan = Plan::new(&attention, dims, transport)?;
        let planned = started.elapsed();
        let segments = Some(Array2::from_elem((1, 400), 1));
        plan.update(&Batch { q_segment_ids: segments, ..Batch::default() })?;
        Ok((rank == 1).then(|| [planned, started.elapsed() - planned]))
    });
    let [planned, updated] = slow.expect("no rank times out")[1].expect("the times of rank 1");
    // the others have waited for longer than the deadline, twice
    assert!(planned > 3 * deadline && updated > deadline, "{planned:?} {updated:?}");
}

/// Action of a rank in one call of [`Workspace::update`] or, once planned, of
/// [`Backend::workspace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// The call succeeds.
    Apply,
    /// The call fails before it changes anything.
    Refuse,
    /// The call fails after it changed everything.
    ApplyThenRefuse,
    /// The device fails.
    Break,
}

/// The next acts, in order; after them every call succeeds. Clones share one script.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script(Arc<Mutex<VecDeque<Act>>>);

impl Script {
    pub(crate) fn set(&self, acts: &[Act]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = acts.iter().copied().collect();
    }

    fn next(&self) -> Act {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(Act::Apply)
    }
}

/// A CPU rank that follows a script.
pub(crate) struct Refusing {
    pub(crate) inner: Cpu,
    pub(crate) script: Script,
}

fn refused() -> Error {
    Error::out_of_memory("a workspace", 1 << 40)
}

/// Runs or refuses `work` by the script.
fn follow<T>(act: Act, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match act {
        Act::Apply => work(),
        Act::Refuse => Err(refused()),
        Act::ApplyThenRefuse => work().and(Err(refused())),
        Act::Break => Err(Error::Device { what: "the device fell off".into() }),
    }
}

/// The workspace of a CPU rank that follows a script.
pub(crate) struct RefusingWorkspace {
    inner: annulus_cpu::CpuWorkspace,
    script: Script,
}

impl Backend for Refusing {
    type Space = Host;
    type Workspace = RefusingWorkspace;

    annulus_core::forward_backend! { capabilities allocate write_block }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<RefusingWorkspace> {
        let inner = follow(self.script.next(), || self.inner.workspace(shard, passes))?;
        Ok(RefusingWorkspace { inner, script: self.script.clone() })
    }
}

impl Workspace for RefusingWorkspace {
    type Space = Host;
    type Forward<'p> = annulus_cpu::CpuForward<'p>;
    type Backward<'p> = annulus_cpu::CpuBackward<'p>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        follow(self.script.next(), || self.inner.update(shard))
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        self.inner.forward(inputs, tick)
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        self.inner.backward(inputs, mode, tick)
    }
}

/// A transport that refuses this rank's part of one all-gather, as MPI refuses one that is too
/// long.
pub(crate) struct Choking<T> {
    pub(crate) inner: T,
    pub(crate) round: Option<u64>,
}

impl<T: Transport<Host>> Transport<Host> for Choking<T> {
    annulus_comm::forward_transport! {
        post progress take pending bytes_sent posts_ahead runs_groups_in_order
    }
}

impl<T: Control> Control for Choking<T> {
    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        if self.round == Some(round) {
            return Err(Error::unsupported("a gather of so many bytes", "this transport"));
        }
        self.inner.start_all_gather(round, bytes)
    }

    annulus_comm::forward_control! {
        rank ranks try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}
