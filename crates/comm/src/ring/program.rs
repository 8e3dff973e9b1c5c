//! The program of one rank: its ring steps, with the byte ranges of all messages. It depends on the
//! mask and the layout, not on tensors, so it is derived once per plan or batch.

use std::{ops::Range, sync::Arc};

use annulus_core::{
    Arrived, BackwardPass, Channel, Error, MessageBalance, MessageHeader, Order, Reduction, Result,
    RowSet, Space,
};
use annulus_plan::{Group, Message, RankSchedule};

use super::overlap::{self, SplitSize};

/// One ring step of a rank.
#[derive(Debug)]
pub(crate) struct RankStep {
    /// Ring index of the owner of the step's block.
    pub(crate) owner: usize,
    /// The owner's local rows that are in the block.
    pub(crate) rows: RowSet,
    /// Blocks of the next step: sent from this step's block, or with `sends_local` from the local
    /// block.
    pub(crate) kv: MessageGroup,
    /// True if the blocks of the next step are sent by their owners.
    pub(crate) sends_local: bool,
    /// As `kv`, with the last block of each rank in parts.
    pub(crate) kv_in_parts: MessageGroup,
    /// Rows of the parts in which `kv_in_parts` delivers this step's block. Empty if it arrives
    /// whole or is the local block.
    pub(crate) parts: Vec<RowSet>,
    /// Gradients of this step's block.
    pub(crate) gradients: MessageGroup,
    /// Records of this step's dK/dV to which the partial sum that arrives is added.
    pub(crate) partial_sum: RangePairs,
    /// Reductions into the local dK/dV of the final gradients that are posted after this step, one
    /// per message, in order.
    pub(crate) home_reduces: Vec<HomeReduce>,
}

/// The steps of a rank, up to the last one with any work.
#[derive(Debug, Default)]
pub(crate) struct RankProgram {
    pub(crate) steps: Vec<RankStep>,
    /// Rows of the local block that other ranks read from it.
    pub(crate) sent: RowSet,
    /// Rows of the local block that are attended to in step 0 of a backward pass; the others, the
    /// tail, come after the last step. See `overlap.rs`.
    pub(crate) head_rows: u64,
    /// Reduction of the tail's gradients into the local dK/dV.
    pub(crate) tail_reduce: HomeReduce,
    /// Rows of the local block.
    pub(crate) local_rows: u64,
    /// Bytes of a record of the circulating block.
    pub(crate) record_bytes: u64,
}

/// One group of transfers. Tags count from 0 within a pass; the ring adds the first tag of the
/// pass.
#[derive(Debug, Default)]
pub(crate) struct MessageGroup {
    pub(crate) sends: Vec<MessageHeader>,
    pub(crate) receives: Vec<MessageHeader>,
}

impl MessageGroup {
    /// Returns the messages of an exchange between all `members`, of which this rank is number
    /// `own`, for some distances: to the member that many places ahead, from the one as many
    /// behind. `bytes` returns the bytes that are sent to a member from the source, and those that
    /// are received from it. Empty messages are left out.
    pub(crate) fn exchange(
        [own, members]: [usize; 2],
        distances: Range<usize>,
        header: impl Fn(usize, Range<u64>) -> MessageHeader,
        bytes: impl Fn(usize) -> [Range<u64>; 2],
    ) -> Self {
        let message =
            |member, bytes: Range<u64>| (!bytes.is_empty()).then(|| header(member, bytes));
        let to = distances.clone().map(|distance| (own + distance) % members);
        let from = distances.map(|distance| (own + members - distance) % members);
        let sent = |member| message(member, bytes(member)[0].clone());
        let received = |member| message(member, bytes(member)[1].clone());
        Self { sends: to.filter_map(sent).collect(), receives: from.filter_map(received).collect() }
    }

    /// Adds these messages of list number `list` to the balance of this rank.
    pub(crate) fn add_to(&self, balance: &mut MessageBalance, list: u64) {
        self.sends.iter().for_each(|message| balance.send(list, message));
        self.receives.iter().for_each(|message| balance.receive(list, message));
    }

    /// Returns the payload bytes that this rank sends.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.sends.iter().map(MessageHeader::bytes).sum()
    }
}

/// Returns the payload bytes that a rank sends with the blocks of these steps.
pub(crate) fn kv_bytes_sent(steps: &[RankStep]) -> u64 {
    steps.iter().map(|step| step.kv.bytes_sent()).sum()
}

/// Sizes by which rows become bytes and blocks are split.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordSizes {
    /// Bytes of a record of the circulating block.
    pub(crate) block: u64,
    /// Bytes of a gradient record; 0 if no gradients travel.
    pub(crate) gradient: u64,
    /// Rows at multiples of which blocks are split.
    pub(crate) split: SplitSize,
}

impl RankProgram {
    /// Derives the program of a rank from its schedule. Messages name ranks; all else counts ring
    /// indices.
    pub(crate) fn new(
        schedule: &RankSchedule,
        order: &Order,
        head_rows: u64,
        sizes: RecordSizes,
    ) -> Self {
        let active = schedule.last_step().map_or(1, |last| last + 1);
        let steps = &schedule.steps[..active];
        let local = &steps[0].rows;
        let last_block = schedule.last_block();
        let mut unwritten: RowSet = std::iter::once(head_rows..local.count()).collect();
        let mut program = Vec::with_capacity(steps.len());
        let mut sent = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            let ranks = schedule.steps.len();
            let sends_local =
                schedule.route.keeps_local(ranks) && !schedule.route.forwards(number + 1, ranks);
            let source = if sends_local { local } else { &step.rows };
            if sends_local || number == 0 {
                let rows = step.before.sends.iter().flat_map(|message| message.rows.ranges());
                sent.extend(rows.cloned());
            }
            let addressing = Addressing { order, step: number, record_bytes: sizes.block };
            let gradients = Addressing { record_bytes: sizes.gradient, ..addressing };
            program.push(RankStep {
                owner: step.owner,
                rows: step.rows.clone(),
                kv: addressing.transfers(&step.before, source, [None; 2]),
                sends_local,
                kv_in_parts: addressing.transfers(
                    &step.before,
                    source,
                    [schedule.sends_last_block[number], last_block == Some(number + 1)]
                        .map(|is_last| is_last.then_some(sizes.split)),
                ),
                parts: if last_block == Some(number) {
                    row_parts(&step.rows, sizes.split)
                } else {
                    Vec::new()
                },
                gradients: gradients.transfers(&step.after, &step.rows, [None; 2]),
                partial_sum: number
                    .checked_sub(1)
                    .and_then(|previous| partial_sums(&steps[previous].after).next())
                    .map(|message| pair(&step.rows, &message.rows))
                    .unwrap_or_default(),
                home_reduces: final_gradients(&step.after)
                    .map(|message| HomeReduce::split(pair(local, &message.rows), &mut unwritten))
                    .collect(),
            });
        }
        let tail = vec![(head_rows..local.count(), 0..local.count() - head_rows)];
        Self {
            steps: program,
            sent: sent.into_iter().collect(),
            head_rows,
            tail_reduce: HomeReduce::split(tail, &mut unwritten),
            local_rows: local.count(),
            record_bytes: sizes.block,
        }
    }

    /// Returns the bytes of the local block.
    pub(crate) const fn local_bytes(&self) -> u64 {
        self.local_rows * self.record_bytes
    }

    /// Returns the number of tail rows of the local block.
    pub(crate) const fn tail_rows(&self) -> u64 {
        self.local_rows - self.head_rows
    }

    /// Returns the tail as local rows.
    pub(crate) fn tail_set(&self) -> RowSet {
        std::iter::once(self.head_rows..self.local_rows).collect()
    }

    /// Returns the tail's records within the buffer of the whole local block.
    pub(crate) fn tail_of<S: Space>(&self, local: &S::Buffer) -> Result<S::Buffer> {
        let tail = self.head_rows * self.record_bytes..self.local_bytes();
        S::part(local, tail).ok_or_else(|| Error::internal("a block that cannot be split"))
    }

    /// Returns the payload bytes of the gradients that this rank sends.
    pub(crate) fn gradient_bytes_sent(&self) -> u64 {
        self.steps.iter().map(|step| step.gradients.bytes_sent()).sum()
    }
}

fn partial_sums(group: &Group) -> impl Iterator<Item = &Message> {
    group.receives.iter().filter(|message| message.channel == Channel::PartialGrad)
}

fn final_gradients(group: &Group) -> impl Iterator<Item = &Message> {
    group.receives.iter().filter(|message| message.channel == Channel::FinalGrad)
}

/// Returns the rows of each part of a block; none if it is not split.
fn row_parts(rows: &RowSet, split: SplitSize) -> Vec<RowSet> {
    let parts = overlap::parts_of(rows, split);
    if parts.len() == 1 {
        return Vec::new();
    }
    let select = |part| overlap::slice(rows.ranges(), part).into_iter().collect();
    parts.iter().map(select).collect()
}

/// Turns messages of a schedule, which name rows and ring indices, into messages of the wire, which
/// name bytes and ranks.
#[derive(Clone, Copy)]
struct Addressing<'a> {
    order: &'a Order,
    step: usize,
    record_bytes: u64,
}

impl Addressing<'_> {
    /// Returns part number `part` of `message`. No message of the pass follows the parts, so they
    /// may use the tags of later steps.
    fn message(&self, message: &Message, part: usize, records: &[Range<u64>]) -> MessageHeader {
        let bytes = |records: &Range<u64>| {
            records.start * self.record_bytes..records.end * self.record_bytes
        };
        MessageHeader {
            peer: self.order.rank(message.peer),
            channel: message.channel,
            tag: (self.step + part) as u64,
            step: self.step,
            ranges: records.iter().map(bytes).collect::<Arc<[_]>>(),
            agreed: None,
        }
    }

    /// Returns the transfers `group` before or after a step. What is sent, and what is received, is
    /// in parts if it has a split size: if it is the last block of its receiver.
    fn transfers(
        &self,
        group: &Group,
        source: &RowSet,
        [sent, received]: [Option<SplitSize>; 2],
    ) -> MessageGroup {
        let parts = |message: &Message, split: Option<SplitSize>| {
            split.map_or_else(
                || std::iter::once(0..message.rows.count()).collect(),
                |split| overlap::parts_of(&message.rows, split),
            )
        };
        let mut transfers = MessageGroup::default();
        for message in &group.sends {
            let records = source.record_ranges(&message.rows);
            for (number, part) in parts(message, sent).iter().enumerate() {
                let records = overlap::slice(&records, part);
                transfers.sends.push(self.message(message, number, &records));
            }
        }
        for message in &group.receives {
            for (number, part) in parts(message, received).iter().enumerate() {
                let records = 0..part.end - part.start;
                let records = std::slice::from_ref(&records);
                transfers.receives.push(self.message(message, number, records));
            }
        }
        transfers
    }
}

/// Pairs the record numbers of `rows` in a buffer of exactly `whole` with those in a buffer of
/// exactly `rows`.
fn pair(whole: &RowSet, rows: &RowSet) -> RangePairs {
    let mut from = 0;
    whole
        .record_ranges(rows)
        .into_iter()
        .map(|into| {
            let count = into.end - into.start;
            from += count;
            (into, from - count..from)
        })
        .collect()
}

/// Pairs `(into, from)` of ranges of record numbers, of equal lengths.
pub(crate) type RangePairs = Vec<(Range<u64>, Range<u64>)>;

/// A reduction of the gradient records of one message into the local dK/dV.
#[derive(Debug, Default)]
pub(crate) struct HomeReduce {
    /// Records that are the first of their rows.
    pub(crate) copied: RangePairs,
    /// All other records.
    pub(crate) added: RangePairs,
}

impl HomeReduce {
    /// Splits `pairs` by whether their rows are `unwritten`, and removes them from that set.
    pub(super) fn split(pairs: RangePairs, unwritten: &mut RowSet) -> Self {
        let mut reduce = Self::default();
        for (into, from) in pairs {
            let mut next = into.start;
            let from_of = |rows: &Range<u64>| {
                from.start + (rows.start - into.start)..from.start + (rows.end - into.start)
            };
            let begin = unwritten.ranges().partition_point(|range| range.end <= into.start);
            for range in
                unwritten.ranges()[begin..].iter().take_while(|range| range.start < into.end)
            {
                let copied = range.start.max(into.start)..range.end.min(into.end);
                if next < copied.start {
                    reduce.added.push((next..copied.start, from_of(&(next..copied.start))));
                }
                next = copied.end;
                reduce.copied.push((copied.clone(), from_of(&copied)));
            }
            if next < into.end {
                reduce.added.push((next..into.end, from_of(&(next..into.end))));
            }
        }
        *unwritten =
            unwritten.difference(&reduce.copied.iter().map(|(into, _)| into.clone()).collect());
        reduce
    }

    /// Reduces the records of a buffer into the local dK/dV.
    pub(super) fn run<S: Space>(
        &self,
        pass: &mut impl BackwardPass<S>,
        local_dkv: &mut S::Buffer,
        arrived: &Arrived<S>,
    ) -> Result<()> {
        let Arrived { buffer, ready } = arrived;
        for (pairs, reduction) in [(&self.copied, Reduction::Copy), (&self.added, Reduction::Add)] {
            if !pairs.is_empty() {
                pass.reduce(local_dkv, buffer, ready, pairs, reduction)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[Range<u64>]) -> RowSet {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn the_first_records_of_a_row_are_copied_and_all_others_added() {
        let mut unwritten = set(&[4..8, 10..20]);
        // a message with rows 2..6 and 7..12, as records 0..4 and 4..9
        let first = HomeReduce::split(vec![(2..6, 0..4), (7..12, 4..9)], &mut unwritten);
        assert_eq!(first.copied, [(4..6, 2..4), (7..8, 4..5), (10..12, 7..9)]);
        assert_eq!(first.added, [(2..4, 0..2), (8..10, 5..7)]);
        assert_eq!(unwritten, set(&[6..7, 12..20]));
        let again = HomeReduce::split(vec![(4..7, 0..3)], &mut unwritten);
        assert_eq!((again.copied, again.added), (vec![(6..7, 2..3)], vec![(4..6, 0..2)]));
        let rest = HomeReduce::split(vec![(12..20, 0..8)], &mut unwritten);
        assert!(rest.added.is_empty() && rest.copied == [(12..20, 0..8)] && unwritten.is_empty());
    }
}
