//! Small host messages: gathers, signs of life, the abort.

use std::time::{Duration, Instant};

use annulus_core::{Control, Error, HostBuffer, Placement, Result};

use super::{
    Mpi,
    frame::Frame,
    gather::Gather,
    memory::Memory,
    pump::Label,
    requests::{Address, LONGEST_PIECE, Mode},
};

/// Signs of life go out no more often than this, whoever calls.
const BEAT_EVERY: Duration = Duration::from_millis(25);

impl Mpi {
    /// Sends a frame to `peer`.
    pub(super) fn say(&mut self, peer: usize, frame: &HostBuffer, label: Label) -> Result<()> {
        // nobody need be there any more to receive what nobody waits for
        let best_effort = matches!(label, Label::Beat { .. });
        let mode = if best_effort { Mode::Standard } else { self.mode() };
        self.say_as(mode, peer, frame, label)
    }

    /// Sends a frame that may be the last, or be never received.
    pub(super) fn say_as(
        &mut self,
        mode: Mode,
        peer: usize,
        frame: &HostBuffer,
        label: Label,
    ) -> Result<()> {
        self.enter()?;
        let to = Address { peer, tag: 0, step: self.step, piece: LONGEST_PIECE };
        let Some(control) = &self.control else { return Ok(()) };
        self.requests.send(
            control,
            mode,
            to,
            Memory::Host(frame.clone()),
            0..frame.bytes().len() as u64,
            label,
        )
    }

    /// All other ranks that have not said goodbye.
    pub(super) fn others(&self) -> Vec<usize> {
        self.peers.staying(self.rank)
    }

    fn start_offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        // a frame of parts is cut behind the one that makes it long
        if bytes.len() as u64 > LONGEST_PIECE / 2 {
            return Err(Error::unsupported(
                format!("a gather of {} bytes a rank", bytes.len()),
                "the transport over MPI",
            ));
        }
        let (rank, number) = (self.rank, self.begun);
        let gather = self.gather(round);
        gather.put(rank, bytes.to_vec());
        gather.number = Some(number);
        self.begun += 1;
        self.spread(round)
    }
}

impl Control for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        let rank = self.rank;
        if self.gather(round).has(rank) {
            return Err(Error::invalid(
                "round",
                round,
                "a gather that this rank has not offered to",
            ));
        }
        self.idle_since = Instant::now();
        self.start_offer(round, bytes).inspect_err(|error| self.fail(error))
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let Some(gather) = self.gathers.get(&round).filter(|gather| gather.number.is_some()) else {
            return Err(Error::invalid(
                "round",
                round,
                "a gather that this rank has offered to and not collected",
            ));
        };
        // whoever has collected may leave, so what others need of it must have left before
        if gather.unsent > 0 || !gather.is_whole() {
            return Ok(None);
        }
        Ok(self.gathers.remove(&round).map(Gather::into_parts))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        let missing =
            |rank: &usize| self.gathers.get(&round).is_none_or(|gather| !gather.has(*rank));
        (0..self.ranks).filter(missing).collect()
    }

    fn abort(&mut self, error: &Error) {
        self.failed.get_or_insert_with(|| error.clone());
        if std::mem::replace(&mut self.told_abort, true) || self.enter().is_err() {
            return;
        }
        // what another rank began is passed on as its, so that all ranks name one origin even if some of its own messages were lost
        let (rank, what) = match error {
            Error::Aborted { rank, what } => (*rank as u64, what.clone()),
            error => (self.rank as u64, error.to_string()),
        };
        let Ok(frame) = (Frame::Abort { rank, what }).encode() else { return };
        for peer in self.others() {
            // a rank that cannot be told finds out by the silence
            drop(self.say_as(Mode::Standard, peer, &frame, Label::Said { peer }));
        }
    }

    fn heartbeat(&mut self, working: bool) {
        if working {
            self.count_work();
        }
        let now = Instant::now();
        let early =
            self.last_beat.is_some_and(|last| now.saturating_duration_since(last) < BEAT_EVERY);
        if early || self.failed.is_some() || self.enter().is_err() {
            return;
        }
        self.last_beat = Some(now);
        let frame = Frame::Beat { worked: self.worked }.encode();
        let told = frame.and_then(|frame| {
            for peer in self.others() {
                // one at a time, so that a rank that does not listen costs no memory
                if !std::mem::replace(&mut self.peers[peer].beating, true) {
                    self.say(peer, &frame, Label::Beat { peer })?;
                }
            }
            Ok(())
        });
        if let Err(error) = told {
            self.fail(&error);
        }
    }

    fn placement(&self) -> Option<&Placement> {
        Some(self.nodes.placement())
    }

    fn last_heard(&self, peer: usize) -> Instant {
        if peer == self.rank { Instant::now() } else { self.peers.heard(peer) }
    }

    fn last_work(&self) -> Instant {
        self.last_work
    }
}
