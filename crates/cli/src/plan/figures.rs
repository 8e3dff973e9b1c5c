//! The figures of a ring: everything that is printed, written as JSON or drawn.

use annulus_core::{
    Choice, Error, Layout, Needs, Result, RingShards, Route, Schedule, Spec, Traffic, Work,
};
use serde::Serialize;

use crate::report::{bytes, counted, grouped};

/// The most ranks of which every step of every rank is written and drawn: 5 MB of either.
pub(super) const MOST_DETAILED_RANKS: usize = 128;

/// The most queries of a plan. What each of them sees is counted: a minute for a billion of them in
/// an optimised build, and some seconds for these.
const MOST_QUERIES: u64 = 1 << 28;

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
    bytes_sent_total: u128,
    /// Payload bytes of a forward pass over the full, untrimmed ring.
    bytes_full_ring_total: u128,
    /// Work of the busiest rank over the mean.
    pub(super) work_max_over_mean: f64,
    /// True if [`Schedule::check`] has proven the messages right: up to [`MOST_DETAILED_RANKS`].
    pub(super) schedule_checked: bool,
    /// The mask in words.
    pub(super) mask: String,
    /// Queries.
    pub(super) q_len: usize,
    /// Keys.
    pub(super) kv_len: usize,
    /// Visible pairs, all heads and batch rows.
    pub(super) pairs_total: u128,
    /// Bytes of the forward pass.
    pub(super) forward: Bytes,
    /// Bytes of the backward pass: keys and values again, and gradients.
    pub(super) backward: Bytes,
    /// What each rank has to do.
    pub(super) per_rank: Vec<RankFigures>,
    /// The steps of each rank; a document of many ranks has [`StepSums`] instead.
    #[serde(skip)]
    pub(super) steps: Vec<StepFigures>,
    /// The same, as the picture needs it.
    #[serde(skip)]
    pub(super) route: Route,
    /// Every rank's rows.
    #[serde(skip)]
    pub(super) coordinates: RingShards,
}

/// Bytes of one pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bytes {
    /// All ranks together.
    pub(super) sent: u128,
    /// Of the full, untrimmed ring.
    pub(super) full_ring: u128,
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
    pub(super) pairs: u128,
    /// The same over the mean of all ranks.
    pub(super) work_over_mean: f64,
    /// Payload bytes that it sends in a forward pass.
    pub(super) bytes_sent: u128,
    /// Payload bytes that it sends in a backward pass.
    pub(super) backward_bytes_sent: u128,
}

/// One step.
#[derive(Debug, Serialize)]
pub(super) struct StepFigures {
    /// Its number.
    pub(super) step: usize,
    /// What each rank does in it.
    pub(super) ranks: Vec<StepOfRank>,
}

/// One step, summed over ranks.
#[derive(Debug, Serialize)]
struct StepSums {
    /// Its number.
    step: usize,
    /// Visible pairs that all ranks compute.
    pairs: u128,
    /// Visible pairs that the busiest rank computes.
    busiest_pairs: u128,
    /// Blocks that are sent meanwhile.
    blocks_sent: usize,
    /// Their payload.
    bytes_sent: u128,
}

/// The figures as a document.
#[derive(Debug, Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    figures: &'a Figures,
    /// Why the steps are sums, where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    steps: Steps<'a>,
}

/// The steps of a document.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Steps<'a> {
    /// Rank by rank.
    Detailed(&'a [StepFigures]),
    /// Of more ranks than [`MOST_DETAILED_RANKS`].
    Summed(Vec<StepSums>),
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
    pub(super) pairs: u128,
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
    pub(super) bytes: u128,
}

impl Figures {
    /// Plans the ring of `spec`; `layout` is chosen from the mask if `None`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more queries than [`MOST_QUERIES`].
    pub(super) fn new(
        spec: &Spec,
        ranks: usize,
        layout: Option<&Layout>,
        mask: String,
    ) -> Result<Self> {
        let queries = spec.dims.q_len as u64
            * if spec.mask.per_head() { spec.dims.q_heads as u64 } else { 1 };
        if queries > MOST_QUERIES {
            return Err(Error::invalid(
                "q_len",
                spec.dims.q_len,
                format!("at most {MOST_QUERIES}, which plan goes through one by one"),
            ));
        }
        let Choice { layout, route, .. } = Choice::auto(spec, ranks, layout, None);
        let coordinates = RingShards::plain(&spec.dims, spec.alignment, &layout, ranks);
        let (heads, batch) = (spec.dims.q_heads, spec.dims.batch);
        let needs = Needs::of_queries(spec.mask.as_ref(), heads, batch, &coordinates);
        let schedule = Schedule::build(&needs, route, true);
        let schedule_checked = ranks <= MOST_DETAILED_RANKS;
        if schedule_checked {
            schedule.check(&needs, true).map_err(Error::internal)?;
        }
        let work = Work::of(spec.mask.as_ref(), heads, batch, &coordinates);
        let (block, gradient) = (spec.kv_row_layout(), spec.gradient_row_layout());
        let forward = |traffic: Traffic| traffic.block_rows * u128::from(block.bytes());
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
        let pass =
            |of: &dyn Fn(Traffic) -> u128| Bytes { sent: of(schedule.sent()), full_ring: of(full) };
        let forward_bytes = pass(&forward);
        Ok(Self {
            ranks,
            layout: layout.name(),
            direction: route.name(),
            hops: schedule.hops(),
            bytes_sent_total: forward_bytes.sent,
            bytes_full_ring_total: forward_bytes.full_ring,
            work_max_over_mean: work.max_over_mean(),
            schedule_checked,
            mask,
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            pairs_total: work.total(),
            forward: forward_bytes,
            backward: pass(&backward),
            per_rank: per_rank.collect(),
            steps: (0..ranks)
                .map(|step| StepFigures::new(step, &schedule, &work, block.bytes()))
                .collect(),
            route,
            coordinates,
        })
    }

    /// Steps up to the last in which anything is computed or passed on; at least 1.
    pub(super) fn busy_steps(&self) -> usize {
        let busy = |step: &StepFigures| {
            step.ranks.iter().any(|at| at.pairs > 0 || (step.step > 0 && at.rows > 0))
        };
        self.steps.iter().rposition(busy).map_or(1, |last| last + 1).min(self.steps.len())
    }

    /// True if every step of every rank is written and drawn.
    pub(super) const fn is_detailed(&self) -> bool {
        self.ranks <= MOST_DETAILED_RANKS
    }

    /// As JSON text.
    pub(super) fn json(&self) -> String {
        let detailed = self.is_detailed();
        let note = format!("steps are summed over ranks: more than {MOST_DETAILED_RANKS} ranks");
        let steps = if detailed {
            Steps::Detailed(&self.steps)
        } else {
            Steps::Summed(self.steps.iter().map(StepSums::of).collect())
        };
        let document = Document { figures: self, note: (!detailed).then_some(note), steps };
        // every number is finite and every key a string: nothing here can fail to be JSON
        serde_json::to_string_pretty(&document).map(|text| text + "\n").unwrap_or_default()
    }

    /// The ring in a line.
    pub(super) fn title(&self) -> String {
        let Self { mask, layout, .. } = self;
        let queries = counted(self.q_len as u64, "query", "queries");
        let keys = counted(self.kv_len as u64, "key", "keys");
        let ranks = counted(self.ranks as u64, "rank", "ranks");
        format!("{mask} · {queries} × {keys} · {ranks} · {layout} layout")
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
            hops => format!("{} hops; {way}", grouped(hops as u64)),
        }
    }
}

impl Bytes {
    /// Sent against the full ring, in words.
    pub(super) fn in_words(self) -> String {
        let Self { sent, full_ring } = self;
        let share = if full_ring > 0 {
            format!(
                ", {:.3} of the full ring's {}",
                sent as f64 / full_ring as f64,
                bytes(full_ring)
            )
        } else {
            String::new()
        };
        format!("{} sent{share}", bytes(sent))
    }
}

impl StepSums {
    fn of(step: &StepFigures) -> Self {
        let sends = || step.ranks.iter().flat_map(|at| &at.sends);
        Self {
            step: step.step,
            pairs: step.ranks.iter().map(|at| at.pairs).sum(),
            busiest_pairs: step.ranks.iter().map(|at| at.pairs).max().unwrap_or_default(),
            blocks_sent: sends().count(),
            bytes_sent: sends().map(|send| send.bytes).sum(),
        }
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
                bytes: u128::from(message.rows.count()) * u128::from(record_bytes),
            });
            let pairs = work.of_step(schedule.route, rank, step);
            Some(StepOfRank {
                rank,
                owner: at.owner,
                rows: at.rows.count(),
                pairs,
                sends: sends.collect(),
            })
        };
        Self { step, ranks: schedule.steps.iter().enumerate().filter_map(of_rank).collect() }
    }
}
