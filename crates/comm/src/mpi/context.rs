//! Context: the messages of one plan over an endpoint that several plans may share.
//!
//! Blocks, all-gathers and last frames carry the number of their context, so messages of different
//! plans are never matched. Everything else belongs to the endpoint: communicators, locations,
//! heartbeats, aborts.
//!
//! Contexts are numbers, not communicators: a further plan costs no message. Ranks drop plans at
//! different times, so they could agree on a free slot of tags (`messages.rs`) only by a message.
//! Instead the number of a plan determines its slot, and a plan whose slot is taken on any rank
//! announces its messages on all. A fatal error ends all plans of an endpoint, because messages of
//! the plan that failed may still be in flight.

use std::collections::{BTreeMap, VecDeque};

use super::{
    circulant::TreeAllGather,
    messages::{Announcement, MpiReceive, QueuedSend, ReceiveStage},
    peers::{Departure, Departures},
};
use crate::message::{LastTags, MessageKey};

/// State of one plan's messages on this rank.
#[derive(Default)]
pub(super) struct PlanContext {
    /// False before this rank has created the context: frames of others may arrive earlier.
    pub(super) is_open: bool,
    /// True if receives with agreed lengths start when they are posted. Then the context has its
    /// slot of tags (`messages.rs`) for itself.
    pub(super) posts_ahead: bool,
    /// Sends that have not completed, with their steps, in order.
    pub(super) sends: Vec<(MessageKey, usize)>,
    /// Those of them that follow another one and have not started.
    pub(super) queued: VecDeque<QueuedSend>,
    /// Posted and not yet taken.
    pub(super) receives: Vec<MpiReceive>,
    /// Announced before their receives were posted.
    pub(super) early: Vec<Announcement>,
    pub(super) last_tags: LastTags,
    pub(super) all_gathers: BTreeMap<u64, TreeAllGather>,
    /// Number of all-gathers that this rank has started.
    pub(super) started: u64,
    /// Step of the last post.
    pub(super) step: usize,
    pub(super) bytes_sent: u64,
    /// True from a heartbeat of a working rank to the end of the next all-gather.
    pub(super) is_working: bool,
    pub(super) departures: Departures,
}

impl PlanContext {
    /// Counts a send as done.
    pub(super) fn end_send(&mut self, key: MessageKey) {
        if let Some(index) = self.sends.iter().position(|(send, _)| *send == key) {
            self.sends.remove(index);
        }
    }

    /// Returns true while any send is in flight.
    pub(super) fn has_unsent(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Returns true while any send or receive is in flight.
    fn has_transfers(&self) -> bool {
        self.has_unsent()
            || self.receives.iter().any(|receive| receive.stage != ReceiveStage::Arrived)
    }

    /// Returns true if this rank is within a call that needs other ranks.
    pub(super) fn is_busy(&self) -> bool {
        self.is_working || self.has_transfers()
    }

    /// Returns true if a rank with this last frame is missing in an all-gather of this rank.
    pub(super) fn misses(&self, departure: &Departure) -> bool {
        self.all_gathers.iter().any(|(round, gather)| {
            gather.is_incomplete()
                && (gather.number >= Some(departure.started)
                    || departure.unfinished.contains(round))
        })
    }

    /// Returns the step in which a message from or to `peer`, which has left, can no longer
    /// complete. `overdue` is true if messages in flight have had their time to.
    pub(super) fn missing_from(
        &self,
        peer: usize,
        departure: &Departure,
        overdue: bool,
    ) -> Option<usize> {
        // its own last frame comes after all its other frames, but its blocks may take a little
        // longer
        let is_final = overdue || !departure.is_forwarded;
        let is_missing = |receive: &&MpiReceive| match receive.stage {
            ReceiveStage::Posted => {
                receive.header.peer == peer
                    && is_final
                    && (overdue || !self.early.iter().any(|early| early.is_for(receive)))
            }
            ReceiveStage::Direct | ReceiveStage::Staged => receive.header.peer == peer && overdue,
            ReceiveStage::Arrived => false,
        };
        let receive = self.receives.iter().find(is_missing).map(|receive| receive.header.step);
        let oldest = || self.sends.iter().find(|(key, _)| key.peer == peer);
        let send = || oldest().filter(|_| overdue).map(|&(_, step)| step);
        // a rank that started an all-gather may leave while other ranks still forward its part
        let started = Some(departure.started);
        let gather = || {
            let misses =
                |gather: &TreeAllGather| gather.is_incomplete() && gather.number >= started;
            self.all_gathers.values().any(misses)
        };
        receive.or_else(send).or_else(|| gather().then_some(self.step))
    }

    /// Returns true if the rank of `departure` has left without forwarding all parts of an
    /// all-gather that is incomplete here.
    pub(super) fn is_unfinished_by(&self, departure: &Departure) -> bool {
        let is_incomplete =
            |round: &u64| self.all_gathers.get(round).is_some_and(TreeAllGather::is_incomplete);
        departure.unfinished.iter().any(is_incomplete)
    }
}
