//! The figures of a ring: everything that is printed, written as JSON or drawn.

use annulus_core::{Choice, Coordinates, Layout, Needs, Route, Schedule, Spec, Traffic, Work};
use serde::Serialize;

use crate::report::{bytes, grouped};

/// A ring in numbers.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Ranks.
    pub(super) ranks: usize,
    /// How rows are dealt.
    pub(super) layout: &'static str,
    /// Which way blocks go: `relay-up` (r to r + 1), `relay-down` (r to r − 1), `direct` (owner to user).
    pub(super) direction: &'static str,
    /// Steps in which any rank sends a block.
    pub(super) hops: usize,
    /// Payload bytes of a forward pass.
    bytes_sent_total: u64,
    /// Payload bytes of a forward pass over the full, untrimmed ring.
    bytes_full_ring_total: u64,
    /// Work of the busiest rank over the mean.
    pub(super) work_max_over_mean: f64,
    /// The mask in words.
    pub(super) mask: String,
    /// Queries.
    pub(super) q_len: usize,
    /// Keys.
    pub(super) kv_len: usize,
    /// Visible pairs, all heads and batch rows.
    pub(super) pairs_total: u64,
    /// Bytes of the forward pass.
    pub(super) forward: Bytes,
    /// Bytes of the backward pass: keys and values again, and gradients.
    pub(super) backward: Bytes,
    /// What each rank has to do.
    pub(super) per_rank: Vec<RankFigures>,
    /// What each rank does in each step.
    pub(super) steps: Vec<StepFigures>,
    /// The same, as the picture needs it.
    #[serde(skip)]
    pub(super) route: Route,
    /// Every rank's rows.
    #[serde(skip)]
    pub(super) coordinates: Coordinates,
}

/// Bytes of one pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bytes {
    /// All ranks together.
    pub(super) sent: u64,
    /// Of the full, untrimmed ring.
    pub(super) full_ring: u64,
}

/// One rank.
#[derive(Debug, Serialize)]
pub(super) struct RankFigures {
    /// Its number.
    pub(super) rank: usize,
    /// Query rows that it holds.
    pub(super) q_rows: u64,
    /// Key rows that it holds.
    pub(super) kv_rows: u64,
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: u64,
    /// The same over the mean of all ranks.
    pub(super) work_over_mean: f64,
    /// Payload bytes that it sends in a forward pass.
    pub(super) bytes_sent: u64,
    /// Payload bytes that it sends in a backward pass.
    pub(super) backward_bytes_sent: u64,
}

/// One step.
#[derive(Debug, Serialize)]
pub(super) struct StepFigures {
    /// Its number.
    pub(super) step: usize,
    /// What each rank does in it.
    pub(super) ranks: Vec<StepOfRank>,
}

/// One step of one rank.
#[derive(Debug, Serialize)]
pub(super) struct StepOfRank {
    /// The rank.
    pub(super) rank: usize,
    /// Whose block it attends.
    pub(super) owner: usize,
    /// How many of the owner's rows are there.
    pub(super) rows: u64,
    /// Visible pairs that it computes.
    pub(super) pairs: u64,
    /// Blocks that it sends meanwhile.
    pub(super) sends: Vec<Send>,
}

/// One block on its way in a forward pass.
#[derive(Debug, Serialize)]
pub(super) struct Send {
    /// The receiver.
    pub(super) to: usize,
    /// Whose rows.
    pub(super) owner: usize,
    /// How many.
    pub(super) rows: u64,
    /// Payload.
    pub(super) bytes: u64,
}

impl Figures {
    /// Plans the ring of `spec`; `layout` is chosen from the mask if `None`.
    pub(super) fn new(spec: &Spec, ranks: usize, layout: Option<&Layout>, mask: String) -> Self {
        let Choice { layout, route, .. } = Choice::auto(spec, ranks, layout, None);
        let coordinates = Coordinates::plain(&spec.dims, spec.alignment, &layout, ranks);
        let (heads, batch) = (spec.dims.q_heads, spec.dims.batch);
        let needs = Needs::of_queries(spec.mask.as_ref(), heads, batch, &coordinates);
        let schedule = Schedule::build(&needs, route, true);
        let work = Work::of(spec.mask.as_ref(), heads, batch, &coordinates);
        let (block, gradient) = (spec.kv_record(), spec.gradient_record());
        let forward = |traffic: Traffic| traffic.block_rows * block.bytes();
        let backward = |traffic: Traffic| traffic.bytes(&block, &gradient);
        let mean = work.total() as f64 / ranks as f64;
        let per_rank = (0..ranks).map(|rank| RankFigures {
            rank,
            q_rows: coordinates.q[rank].rows.len(),
            kv_rows: coordinates.kv[rank].rows.len(),
            pairs: work.of_rank(rank),
            work_over_mean: if mean > 0.0 { work.of_rank(rank) as f64 / mean } else { 0.0 },
            bytes_sent: forward(schedule.sent_by(rank)),
            backward_bytes_sent: backward(schedule.sent_by(rank)),
        });
        let full = Traffic::full_ring(&needs.held, true);
        let pass = |of: &dyn Fn(Traffic) -> u64| Bytes { sent: of(schedule.sent()), full_ring: of(full) };
        let forward_bytes = pass(&forward);
        Self {
            ranks,
            layout: layout.name(),
            direction: route.name(),
            hops: schedule.hops(),
            bytes_sent_total: forward_bytes.sent,
            bytes_full_ring_total: forward_bytes.full_ring,
            work_max_over_mean: work.max_over_mean(),
            mask,
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            pairs_total: work.total(),
            forward: forward_bytes,
            backward: pass(&backward),
            per_rank: per_rank.collect(),
            steps: (0..ranks).map(|step| StepFigures::new(step, &schedule, &work, block.bytes())).collect(),
            route,
            coordinates,
        }
    }

    /// Steps up to the last in which anything is computed or passed on; at least 1.
    pub(super) fn busy_steps(&self) -> usize {
        let busy = |step: &StepFigures| step.ranks.iter().any(|at| at.pairs > 0 || (step.step > 0 && at.rows > 0));
        self.steps.iter().rposition(busy).map_or(1, |last| last + 1).min(self.steps.len())
    }

    /// As JSON text.
    pub(super) fn json(&self) -> String {
        // every number is finite and every key a string: nothing here can fail to be JSON
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }

    /// The ring in a line.
    pub(super) fn title(&self) -> String {
        let Self { mask, ranks, layout, .. } = self;
        let (q_len, kv_len, plural) = (grouped(self.q_len), grouped(self.kv_len), if *ranks == 1 { "" } else { "s" });
        format!("{mask} · {q_len} queries × {kv_len} keys · {ranks} rank{plural} · {layout} layout")
    }

    /// How blocks go, in a line.
    pub(super) fn hops_in_words(&self) -> String {
        let way = match self.route {
            Route::RelayUp => "each rank hands blocks on to the next (relay-up)",
            Route::RelayDown => "each rank hands blocks on to the one before (relay-down)",
            Route::Direct => "owners send blocks straight to their users (direct)",
        };
        match self.hops {
            0 => "no hop: every rank has all that it needs".to_owned(),
            1 => format!("1 hop; {way}"),
            hops => format!("{hops} hops; {way}"),
        }
    }
}

impl Bytes {
    /// Sent against the full ring, in words.
    pub(super) fn in_words(self) -> String {
        let Self { sent, full_ring } = self;
        let share = if full_ring > 0 {
            format!(", {:.3} of the full ring's {}", sent as f64 / full_ring as f64, bytes(full_ring))
        } else {
            String::new()
        };
        format!("{} sent{share}", bytes(sent))
    }
}

impl StepFigures {
    fn new(step: usize, schedule: &Schedule, work: &Work, record_bytes: u64) -> Self {
        let of_rank = |(rank, steps): (usize, &Vec<annulus_core::Step>)| {
            let at = steps.get(step)?;
            let sends = at.before.sends.iter().map(|message| Send {
                to: message.peer,
                owner: message.owner,
                rows: message.rows.count(),
                bytes: message.rows.count() * record_bytes,
            });
            let pairs = work.of_step(schedule.route, rank, step);
            Some(StepOfRank { rank, owner: at.owner, rows: at.rows.count(), pairs, sends: sends.collect() })
        };
        Self { step, ranks: schedule.steps.iter().enumerate().filter_map(of_rank).collect() }
    }
}
